"""Checkpoints in object storage: the marker without a rename, retention, crashes at any moment."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mcore_ckpt
from mcore_ckpt import CheckpointError
from mcore_ckpt.commit import begin, scan
from mcore_ckpt.fsspec_storage import FsspecStorage
from mcore_ckpt.kv_storage import KvStorage
from mcore_ckpt.object_storage import ObjectStorage
from mcore_parallel.layout import LayoutTensor, TensorLayout

Make = Callable[[], ObjectStorage]
KINDS = ["fsspec-memory", "fsspec-files", "kv-memory", "kv-files"]


@pytest.fixture(params=KINDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStorage:
    kind, _, place = request.param.partition("-")
    url = f"memory://bucket{tmp_path}/run" if place == "memory" else f"file://{tmp_path}/run"
    if kind == "kv":
        return KvStorage(url)
    return FsspecStorage(url, **({"auto_mkdir": True} if place == "files" else {}))


def tensors(step: int) -> dict[str, LayoutTensor]:
    values = {
        "model/matrix": torch.arange(700.0).view(20, 35) + step,
        "model/brain": torch.full((9,), step).bfloat16(),
        "exp_avg/scalar": torch.tensor(float(step)),
    }
    return {
        name: LayoutTensor(value, TensorLayout.whole(name, tuple(value.shape)))
        for name, value in values.items()
    }


def save(storage: ObjectStorage, step: int, **options: object) -> None:
    mcore_ckpt.save(
        "run", step=step, tensors=tensors(step), state={"at": step}, files={"a/b": b"text"},
        storage=storage, chunk_bytes=512, **options,
    )  # fmt: skip


def names(storage: ObjectStorage) -> list[str]:
    return [path.name for path in mcore_ckpt.list_checkpoints("", storage=storage)]


def test_saved_loaded_verified_kept(storage: ObjectStorage) -> None:
    """Everything that a file system does, but for addresses in place of paths."""
    assert mcore_ckpt.latest("", storage=storage) is None
    assert mcore_ckpt.find("", storage=storage) is None
    for step in (1, 2, 3):
        save(storage, step, keep_last=2)
    assert names(storage) == ["step_00000002", "step_00000003"]
    assert sorted(storage.entries("")) == names(storage)
    found = mcore_ckpt.find("", storage=storage, scan="full")
    assert found is not None
    assert (found.step, found.state) == (3, {"at": 3})
    for path in ("", "step_00000002"):
        opened = mcore_ckpt.open(path, storage=storage)
        expected = tensors(opened.step)
        for name in opened:
            assert torch.equal(opened[name], expected[name].tensor), name
        assert opened.file("a/b") == b"text"
    rows = LayoutTensor(
        torch.zeros(5, 35), TensorLayout.whole("model/matrix", (20, 35)).slice(0, 3, 8)
    )
    mcore_ckpt.load("", {"x": rows}, prefixes=["model/matrix"], storage=storage, scan="quick")
    assert torch.equal(rows.tensor, tensors(3)["model/matrix"].tensor[3:8])
    assert not mcore_ckpt.verify("", storage=storage).problems
    pruned = mcore_ckpt.prune("", keep_last=1, storage=storage)
    assert [path.name for path in pruned.removed] == ["step_00000002"]
    assert sorted(storage.entries("")) == names(storage) == ["step_00000003"]


def test_few_large_objects(storage: ObjectStorage) -> None:
    """Compressed, and many chunks in an object; a chunk alone is fetched from it."""
    save(storage, 1, compression="zstd", file_bytes=2048)
    opened = mcore_ckpt.open("", storage=storage)
    info = opened.info("model/matrix")
    assert info.files.num_chunks < info.grid.num_chunks
    expected = tensors(1)
    assert all(torch.equal(opened[name], expected[name].tensor) for name in opened)
    assert not mcore_ckpt.verify("", storage=storage).problems
    path = f"step_00000001/model/matrix/{info.files.key(0)}"
    whole = storage.get(path)
    assert storage.get_part(path, 3, 9) == whole[3:9]
    assert storage.get_part(path, -20) == whole[-20:]
    assert storage.size(path) == len(whole)
    with pytest.raises(FileNotFoundError):
        storage.get(f"{path}.none")
    assert storage.size(f"{path}.none") is None


def test_damage(storage: ObjectStorage) -> None:
    save(storage, 1, compression="zstd")
    save(storage, 2)
    chunk = "step_00000002/model/matrix/c.0.0"
    data = storage.get(chunk)
    storage.put(chunk, data[:9] + bytes([data[9] ^ 1]) + data[10:])
    (problem,) = mcore_ckpt.verify("", storage=storage).problems
    assert problem.where == "model/matrix/c.0.0"
    with pytest.raises(CheckpointError, match="is damaged"):
        mcore_ckpt.load("", tensors(0), storage=storage)
    with pytest.warns(RuntimeWarning, match="passed over"):
        found = mcore_ckpt.find("", storage=storage, scan="full")
    assert found is not None
    assert found.path.name == "step_00000001"
    storage.remove(chunk)
    with pytest.warns(RuntimeWarning, match="is missing"):
        mcore_ckpt.find("", storage=storage, scan="quick")
    with pytest.raises(CheckpointError, match="cannot read chunk"):
        mcore_ckpt.load("", tensors(0), storage=storage)


class CrashError(Exception):
    pass


class Crashing(FsspecStorage):
    """Stops working after so many puts and removals."""

    left = 10**9

    def _count(self) -> None:
        if self.left == 0:
            raise CrashError
        self.left -= 1

    def put(self, path: str, data: bytes) -> None:
        self._count()
        super().put(path, data)

    def remove(self, path: str) -> None:
        self._count()
        super().remove(path)


def save_both(storage: ObjectStorage) -> None:
    for step in (1, 2):
        scalar = {"x": tensors(step)["exp_avg/scalar"]}
        mcore_ckpt.save("run", step=step, tensors=scalar, storage=storage, keep_last=1)


def test_a_crash_after_any_number_of_operations(tmp_path: Path) -> None:
    """The newest committed checkpoint loads; the next save sweeps the rest away.

    U49: whatever was put before, a checkpoint is one from the put of its marker to its deletion.
    """
    counting = Crashing(f"memory://crash{tmp_path}/whole")
    save_both(counting)
    total = 10**9 - counting.left
    seen = set()
    for count in range(1, total):
        storage = Crashing(f"memory://crash{tmp_path}/{count}")
        storage.left = count
        with pytest.raises((CrashError, CheckpointError)):
            save_both(storage)
        storage.left = 10**9
        found = mcore_ckpt.find("", storage=storage, scan="full")
        seen.add(found.step if found else 0)
        if found:
            value = mcore_ckpt.open("", storage=storage)["exp_avg/scalar"]
            assert float(value) == found.step
        if count % 7 == 0:
            save(storage, 5, keep_last=1)
            assert sorted(storage.entries("")) == ["step_00000005"]
    assert seen == {0, 1, 2}


def test_a_marker_beside_the_mark_of_a_save(storage: ObjectStorage) -> None:
    """What a crash between the two steps of a rename leaves is committed: nothing is missing."""
    save(storage, 1)
    storage.put("step_00000001/UNCOMMITTED", storage.get("step_00000001/COMMIT"))
    assert names(storage) == ["step_00000001"]
    name = begin(storage, 2)
    assert [found.name for found in scan(storage)] == ["step_00000001", name]
    assert names(storage) == ["step_00000001"]
