"""Files of many chunks: written as one, read chunk by chunk, by every reader; damage is found."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import tensorstore
import torch
import zarr

import mcore_ckpt
from mcore_ckpt import CheckpointError, TensorInfo
from mcore_ckpt.cli import main
from mcore_ckpt.engine import Engine
from mcore_ckpt.file_engine import FileEngine
from mcore_ckpt.grid import chunk_shape, file_shape
from mcore_ckpt.kv_storage import KvStorage
from mcore_ckpt.tensorstore_engine import TensorstoreEngine
from mcore_ckpt.zarr_engine import ZarrEngine
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor, TensorLayout
from mcore_parallel.testing import RankPool

SHAPES = {"model/matrix": (101, 1003), "model/cube": (7, 30, 11), "model/small": (3,)}
VALUES = {
    name: torch.arange(math.prod(shape)).view(shape).bfloat16() for name, shape in SHAPES.items()
}
SIZES: dict[str, Any] = {"chunk_bytes": 8 << 10, "file_bytes": 48 << 10}
ENGINES = {"default": None, "tensorstore": TensorstoreEngine(), "zarr": ZarrEngine()}


def cut(parts: int, rank: int) -> dict[str, LayoutTensor]:
    """Every tensor in rows, as evenly as goes."""
    tensors = {}
    for name, value in VALUES.items():
        rows = [value.shape[0] * i // parts for i in (rank, rank + 1)]
        layout = TensorLayout.whole(name, tuple(value.shape)).slice(0, *rows)
        tensors[name] = LayoutTensor(value[slice(*rows)].clone(), layout)
    return tensors


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("writer", ENGINES)
def test_each_reads_what_each_writes(tmp_path: Path, writer: str, compression: str | None) -> None:
    path = mcore_ckpt.save(
        tmp_path,
        step=1,
        tensors=cut(1, 0),
        engine=ENGINES[writer],
        compression=compression,
        **SIZES,
    )
    engine: Engine | None
    for engine in ENGINES.values():
        opened = mcore_ckpt.Checkpoint(path, engine)
        for name, value in VALUES.items():
            assert torch.equal(opened[name], value), name
    info = opened.info("model/matrix")
    assert len(list((path / "model/matrix").glob("c.*"))) == info.files.num_chunks
    assert 1 < info.files.num_chunks < info.grid.num_chunks / 3
    assert opened.info("model/small").file_shape is None
    assert opened.manifest.version == 2
    bits = VALUES["model/cube"].view(torch.uint16).numpy()
    assert (zarr.open_group(path, mode="r")["model/cube"][...] == bits).all()
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/model/cube/"}}
    assert (tensorstore.open(spec).result().read().result() == bits).all()
    assert not mcore_ckpt.verify(path).problems


def _save(folder: Path) -> None:
    group = Group.world()
    with mcore_ckpt.AsyncSaver(group) as saver:
        saver.save(folder, step=1, tensors=cut(group.size, group.rank), **SIZES)


def _load(folder: Path) -> None:
    group = Group.world()
    wanted = cut(group.size, group.rank)
    held = {k: LayoutTensor(torch.zeros_like(x.tensor), x.layout) for k, x in wanted.items()}
    mcore_ckpt.load(folder, held, group, scan="full")
    assert all(torch.equal(held[key].tensor, x.tensor) for key, x in wanted.items())


def test_files_do_not_depend_on_the_layout(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks write what one writes; three read it; `reshard` makes it of plain chunks."""
    ranks.run(_save, 2, tmp_path / "two")
    ranks.run(_load, 3, tmp_path / "two")
    one = mcore_ckpt.save(tmp_path / "one", step=1, tensors=cut(1, 0), **SIZES)
    plain = mcore_ckpt.save(tmp_path / "plain", step=1, tensors=cut(1, 0), chunk_bytes=8 << 10)
    sizes = ["--chunk-size", "8KiB", "--file-size", "48KiB"]
    assert main(["reshard", str(plain), str(tmp_path / "again"), *sizes]) == 0
    capsys.readouterr()
    for other in (tmp_path / "two" / one.name, tmp_path / "again" / one.name):
        for file in one.glob("model/**/*"):
            if file.is_file():
                assert file.read_bytes() == (other / file.relative_to(one)).read_bytes(), file


def test_damage_is_found(tmp_path: Path) -> None:
    path = mcore_ckpt.save(tmp_path, step=1, tensors=cut(1, 0), **SIZES)
    opened = mcore_ckpt.open(path)
    info = opened.info("model/matrix")
    key = info.files.key(1)
    file = path / "model/matrix" / key
    data = file.read_bytes()
    flipped = bytearray(data)
    flipped[5] ^= 1  # in the first chunk of the file
    file.write_bytes(flipped)
    (problem,) = mcore_ckpt.verify(path).problems
    assert problem.where == f"model/matrix/{key}"
    assert problem.chunk == info.grid.coordinates(info.inside(1)[0])
    flipped = bytearray(data)
    flipped[-9] ^= 1  # in the index
    file.write_bytes(flipped)
    assert len(mcore_ckpt.verify(path).problems) == len(info.inside(1))
    with pytest.raises(CheckpointError, match=f"model/matrix/{key}"):
        opened["model/matrix"]
    file.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        mcore_ckpt.find(path, scan="quick")


@pytest.mark.parametrize("dim", [0, 1])
def test_a_shard_of_eight_reads_itself(tmp_path: Path, dim: int) -> None:
    """At most 1.1 times its bytes, every chunk verified, of files that hold much more."""
    shape = (2048, 2048)
    value = torch.randn(shape)
    whole = TensorLayout.whole("model/up", shape)
    storage = KvStorage(f"file://{tmp_path}/run")
    mcore_ckpt.save(
        "",
        step=1,
        tensors={"x": LayoutTensor(value, whole)},
        storage=storage,
        chunk_bytes=256 << 10,
        file_bytes=4 << 20,
    )
    info = mcore_ckpt.open("", storage=storage).info("model/up")
    assert info.files.num_chunks == 4
    size = shape[dim] // 8
    layout = whole.slice(dim, 3 * size, 4 * size)
    held = LayoutTensor(torch.zeros(layout.shape), layout)
    before = bytes_read()
    mcore_ckpt.load("", {"x": held}, storage=storage)
    wanted = held.tensor.numel() * 4
    manifest = storage.size("step_00000001/manifest.json") or 0
    assert wanted <= bytes_read() - before - manifest <= 1.1 * wanted
    assert torch.equal(held.tensor, value.narrow(dim, 3 * size, size))


def bytes_read() -> int:
    (metric,) = tensorstore.experimental_collect_matching_metrics(
        "/tensorstore/kvstore/file/bytes_read"
    )
    return int(metric["values"][0]["value"])


def test_every_chunk_is_in_one_file() -> None:
    """Whatever the shape: files of whole chunks, within the bound, one place for each chunk."""
    pick = random.Random(5)
    for _ in range(100):
        shape = tuple(pick.randint(1, 13) for _ in range(pick.randint(1, 3)))
        cut_to = chunk_shape(shape, 2, pick.choice([16, 100, 1000]))
        bound = pick.choice([64, 500, 5000, 10**6])
        files = file_shape(shape, cut_to, 2, bound)
        info = TensorInfo(dtype="bfloat16", shape=shape, chunk_shape=cut_to, file_shape=files)
        if files is not None:
            assert all(a % b == 0 for a, b in zip(files, cut_to, strict=True))
            assert math.prod(cut_to) * 2 < info.file_bytes <= bound
        place = {n: f for f in range(info.files.num_chunks) for n in info.inside(f)}
        assert sorted(place) == list(range(info.grid.num_chunks))
        assert all(info.key(n) == info.files.key(f) for n, f in place.items())


def test_mistakes(tmp_path: Path) -> None:
    for options, message in (
        ({"file_bytes": 0}, "file_bytes is 0; nearest valid: 1"),
        ({"file_bytes": 9, "engine": FileEngine()}, "writes chunks as they"),
    ):
        with pytest.raises(ValueError, match=message):
            mcore_ckpt.save(tmp_path, step=1, tensors=cut(1, 0), **options)
