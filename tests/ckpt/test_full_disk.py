"""Disks that are full, or may not be written: the checkpoint before is intact, the error helps."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.advice import advice
from mcore_ckpt.cli import main
from mcore_ckpt.hf.sink import SafetensorsSink
from mcore_ckpt.local import find_local, save_local
from mcore_ckpt.storage import LocalStorage
from mcore_parallel.layout import LayoutTensor, TensorLayout
from mcore_parallel.mapping import TensorMeta


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root may mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def tensors(kilobytes: int, value: float) -> dict[str, LayoutTensor]:
    shape = (kilobytes, 256)
    return {"w": LayoutTensor(torch.full(shape, value), TensorLayout.whole("model/w", shape))}


def save(how: str, folder: Path, **options: Any) -> None:
    if how == "at once":
        mcore_ckpt.save(folder, **options)
        return
    with mcore_ckpt.AsyncSaver() as saver:
        saver.save(folder, **options)


@pytest.mark.parametrize("how", ["at once", "in the background"])
def test_a_full_disk(small_disk: Path, how: str) -> None:
    """What was there stays, what was half-written goes, and what fits can be saved afterwards."""
    save(how, small_disk, step=1, tensors=tensors(300, 1.0))
    before = sorted(os.listdir(small_disk))
    with pytest.raises(
        mcore_ckpt.CheckpointError,
        match=r"saving step 2 to .* nothing was committed.*No space left on device.*free space",
    ):
        save(how, small_disk, step=2, tensors=tensors(900, 2.0), keep_last=1, chunk_bytes=1 << 16)
    assert sorted(os.listdir(small_disk)) == before == ["step_00000001"]
    assert not mcore_ckpt.verify(small_disk).problems
    assert bool((mcore_ckpt.open(small_disk)["model/w"] == 1).all())
    save(how, small_disk, step=3, tensors=tensors(400, 3.0), keep_last=1)
    assert sorted(os.listdir(small_disk)) == ["step_00000003"]


def test_a_full_disk_of_a_machine(small_disk: Path) -> None:
    save_local(small_disk, step=1, tensors=tensors(400, 1.0))
    with pytest.raises(mcore_ckpt.CheckpointError, match=r"saving step 2 .*free space there"):
        save_local(small_disk, step=2, tensors=tensors(700, 2.0))
    found = find_local(small_disk)
    assert found is not None
    assert found.step == 1
    assert len(os.listdir(small_disk)) == 1


def test_commands_on_a_full_disk(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that helps, what is read is intact, and nothing half-written takes up room."""
    run = str(small_disk / "run")
    for step in (1, 2):
        state = {"config": {"model": {"size": 256}}}
        mcore_ckpt.save(run, step=step, tensors=tensors(350, float(step)), state=state)
    new = str(small_disk / "new")
    for command in (
        ["reshard", run, new, "--chunk-size", "64KiB"],
        ["average", f"{run}/step_00000001", run, "--to", new],
        ["convert", "--from", "native", run, "--to", "dcp", new],
        ["convert", "--from", "native", run, "--to", "native", new],
    ):
        assert main(command) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("mcore-ckpt: [Errno 28] ")
        assert "No space left on device: free space there" in err
        assert err.count("\n") == 1
        assert not [path for path in small_disk.rglob("*") if path.is_file() and "new" in str(path)]
    sink = SafetensorsSink(new + "-hf", {"w": TensorMeta((350, 256), torch.float32)})
    with pytest.raises(OSError, match="No space left on device"), sink:
        sink.write("w", tensors(350, 1.0)["w"].tensor)
    assert not list(small_disk.glob("new-hf*"))
    assert main(["verify", run]) == 0
    assert main(["prune", run, "--keep-last", "1"]) == 0
    assert main(["convert", "--from", "native", run, "--to", "dcp", new]) == 0


class Refusing(LocalStorage):
    """A disk that refuses one kind of operation on the new checkpoint."""

    def __init__(self, root: Path, operation: str, number: int) -> None:
        super().__init__(root)
        self.operation, self.number = operation, number

    def _refuse(self, operation: str, path: str) -> None:
        if operation == self.operation and path.startswith("step_00000002"):
            raise OSError(self.number, os.strerror(self.number), self.location(path))

    def make_directory(self, path: str) -> None:
        self._refuse("make_directory", path)
        super().make_directory(path)

    def put(self, path: str, data: bytes) -> None:
        self._refuse("put", path)
        super().put(path, data)

    def rename(self, old: str, new: str) -> None:
        self._refuse("rename", new)
        super().rename(old, new)


@pytest.mark.parametrize("how", ["at once", "in the background"])
@pytest.mark.parametrize(
    ("number", "help_text"),
    [
        (errno.EACCES, "make the directory writable"),
        (errno.EROFS, "mounted read-only"),
        (errno.EDQUOT, "free space there"),
        (errno.ESTALE, "mount it again"),
    ],
)
@pytest.mark.parametrize("operation", ["make_directory", "put", "rename"])
def test_what_is_refused(
    tmp_path: Path, operation: str, number: int, help_text: str, how: str
) -> None:
    """At the first directory, at the first file, and at the very end, when all else is written."""
    mcore_ckpt.save(tmp_path, step=1, tensors=tensors(1, 1.0))
    storage = Refusing(tmp_path, operation, number)
    with pytest.raises(mcore_ckpt.CheckpointError, match=f"saving step 2 .*{help_text}"):
        save(how, tmp_path, step=2, tensors=tensors(1, 2.0), keep_last=1, storage=storage)
    assert mcore_ckpt.open(tmp_path).step == 1
    mcore_ckpt.save(tmp_path, step=2, tensors=tensors(1, 2.0), keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def test_advice() -> None:
    """By number, by what an engine passes on as text, and none where nobody knows any."""
    for error in (OSError(28, "…"), OSError("cannot write c.0: No space left on device [28]")):
        found = advice(error)
        assert found is not None
        assert "free space" in found
    assert advice(OSError(errno.EIO, "Input/output error")) is None
