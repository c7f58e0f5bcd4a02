"""What every engine does with chunks, and how little the default one reads."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mcore_ckpt
from mcore_ckpt import CheckpointError, ChunkData, LocalStorage, Region, TensorInfo, file_engine
from mcore_ckpt.engine import Engine
from mcore_ckpt.file_engine import FileEngine
from mcore_ckpt.tensorstore_engine import TensorstoreEngine
from mcore_ckpt.zarr_engine import ZarrEngine
from mcore_parallel.layout import Box, LayoutTensor, TensorLayout

ENGINES = [
    FileEngine(inflight_bytes=100),
    TensorstoreEngine(inflight_bytes=100),
    ZarrEngine(inflight_bytes=100),
]
IDS = ["files", "tensorstore", "zarr"]
INFOS = {
    "matrix": TensorInfo(dtype="float32", shape=(5, 7), chunk_shape=(2, 3)),
    "bits": TensorInfo(dtype="bfloat16", shape=(9,), chunk_shape=(4,)),
    "scalar": TensorInfo(dtype="int64", shape=(), chunk_shape=()),
    "cube": TensorInfo(dtype="bool", shape=(3, 2, 4), chunk_shape=(2, 1, 4)),
}


def values(info: TensorInfo) -> Any:
    """A tensor made of its whole chunks, and zeros beyond its edge."""
    dtype = {"bfloat16": "uint16"}.get(info.dtype, info.dtype)
    counts = zip(info.grid.counts, info.chunk_shape, strict=True)
    whole = np.zeros([c * n for c, n in counts], dtype)
    inner = np.arange(np.prod(info.shape, dtype=int)).reshape(info.shape) % 5 + 1
    whole[tuple(slice(0, n) for n in info.shape)] = inner
    return whole


def chunks(name: str) -> list[ChunkData]:
    info = INFOS[name]
    result = []
    for number in range(info.grid.num_chunks):
        start = info.grid.box(number).start
        box = Box(start, info.chunk_shape)
        data = np.array(values(info)[box.slices], order="C")
        result.append(ChunkData(array=name, info=info, number=number, data=data))
    return result


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    for name in INFOS:
        (tmp_path / name).mkdir()
    return LocalStorage(tmp_path)


@pytest.mark.parametrize("reader", ENGINES, ids=IDS)
@pytest.mark.parametrize("writer", ENGINES, ids=IDS)
def test_each_reads_what_each_writes(storage: LocalStorage, writer: Engine, reader: Engine) -> None:
    every = [chunk for name in INFOS for chunk in chunks(name)]
    writer.write(storage, every).wait()
    for chunk in every:
        where = storage.location(f"{chunk.array}/{chunk.info.grid.key(chunk.number)}")
        assert Path(where).read_bytes() == chunk.data.tobytes()
    regions, expected = [], []
    for chunk in every:
        box = chunk.info.grid.box(chunk.number)
        halves = tuple(max(1, n // 2) for n in box.shape)
        far = tuple(a + n - h for a, n, h in zip(box.start, box.shape, halves, strict=True))
        for part in (box, Box(box.start, halves), Box(far, halves)):
            regions.append(Region(array=chunk.array, info=chunk.info, box=part))
            expected.append(values(chunk.info)[part.slices])
    for found, value in zip(reader.read(storage, regions), expected, strict=True):
        assert np.array_equal(found, value)
        assert found.shape == value.shape


@pytest.mark.parametrize("engine", ENGINES, ids=IDS)
def test_damage_is_named(storage: LocalStorage, engine: Engine) -> None:
    engine.write(storage, chunks("matrix")).wait()
    info = INFOS["matrix"]
    region = Region(array="matrix", info=info, box=info.grid.box(4))
    file = Path(storage.location("matrix/c.1.1"))
    for damage in (lambda: file.write_bytes(file.read_bytes()[:-4]), file.unlink):
        damage()
        with pytest.raises(CheckpointError, match=r"cannot read chunk .*matrix/c\.1\.1: "):
            list(engine.read(storage, [region]))


@pytest.mark.parametrize("engine", ENGINES, ids=IDS)
def test_a_disk_that_refuses(storage: LocalStorage, engine: Engine) -> None:
    (Path(storage.location("matrix")) / "c.0.1").mkdir()
    with pytest.raises(OSError, match=r"cannot write chunk .*matrix/c\.0\.1"):
        engine.write(storage, chunks("matrix")).wait()


def test_the_error_of_the_system_is_kept(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(location: str, data: Any, **options: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), location)

    monkeypatch.setattr(file_engine, "write_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        FileEngine().write(storage, chunks("matrix")).wait()
    assert caught.value.errno == errno.ENOSPC


def test_a_chunk_that_is_too_long_is_damage(storage: LocalStorage) -> None:
    FileEngine().write(storage, chunks("scalar")).wait()
    with Path(storage.location("scalar/c")).open("ab") as file:
        file.write(b"x")
    region = Region(array="scalar", info=INFOS["scalar"], box=Box((), ()))
    with pytest.raises(CheckpointError, match="it has 9 bytes instead of 8"):
        list(FileEngine().read(storage, [region]))


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A matrix of 64 MiB as large models have them, and what lies beside it."""
    shapes = {"model/up": (8192, 4096), "model/norm": (4096,), "exp_avg/norm": (4096,)}
    tensors = {
        name: LayoutTensor(
            torch.arange(shape[0])
            .to(torch.bfloat16)
            .view(-1, *[1] * (len(shape) - 1))
            .expand(shape)
            .contiguous(),
            TensorLayout.whole(name, shape),
        )
        for name, shape in shapes.items()
    }
    return mcore_ckpt.save(tmp_path_factory.mktemp("big"), step=1, tensors=tensors)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rank", [0, 5])
def test_a_shard_of_eight_reads_little_more_than_itself(
    big: Path, dim: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 1.1 times its bytes, with every chunk verified."""
    count = 0
    real = file_engine.read_file

    def counting(location: str, into: memoryview, **options: int) -> None:
        nonlocal count
        count += len(into)
        real(location, into, **options)

    monkeypatch.setattr(file_engine, "read_file", counting)
    up = TensorLayout.whole("model/up", (8192, 4096))
    size = up.shape[dim] // 8
    layouts = {
        "up": up.slice(dim, size * rank, size * rank + size),
        "norm": TensorLayout.whole("model/norm", (4096,)).replicated(rank, 8),
    }
    held = {
        key: LayoutTensor(torch.zeros(layout.shape, dtype=torch.bfloat16), layout)
        for key, layout in layouts.items()
    }
    mcore_ckpt.load(big, held, prefixes=["model/"])
    wanted = sum(x.tensor.numel() * 2 for x in held.values())
    assert wanted <= count <= 1.1 * wanted
    first = size * rank if dim == 0 else 0
    expected = torch.arange(first, first + held["up"].tensor.shape[0]).to(torch.bfloat16)
    assert torch.equal(held["up"].tensor[:, 0], expected)


def test_without_checksums_rows_alone_are_read(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    real = file_engine.read_file

    def counting(location: str, into: memoryview, **options: int) -> None:
        nonlocal count
        count += len(into)
        real(location, into, **options)

    monkeypatch.setattr(file_engine, "read_file", counting)
    layout = TensorLayout.whole("model/up", (8192, 4096)).slice(0, 700, 710)
    held = LayoutTensor(torch.zeros(10, 4096, dtype=torch.bfloat16), layout)
    mcore_ckpt.load(big, {"up": held}, prefixes=["model/up"], verify=False)
    assert count == 10 * 4096 * 2
    assert torch.equal(held.tensor[:, 4095], torch.arange(700, 710).to(torch.bfloat16))
