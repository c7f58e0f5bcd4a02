"""Chunks on their way: from where tensors are, with their checksums, and back into tensors."""

import builtins
import importlib
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mcore_ckpt
from mcore_ckpt import CheckpointError, ChunkData, LocalStorage, Region, TensorInfo
from mcore_ckpt import checksum as checksums
from mcore_ckpt.engine import Engine, Writing
from mcore_ckpt.file_engine import FileEngine
from mcore_ckpt.storage import Storage
from mcore_ckpt.tensorstore_engine import TensorstoreEngine
from mcore_parallel.layout import LayoutTensor, TensorLayout

ENGINES = [FileEngine(io_threads=2), TensorstoreEngine()]
IDS = ["files", "tensorstore"]


def views() -> dict[str, Any]:
    """Arrays as parts of tensors are: of all strides, some larger than what is written at once."""
    big = np.arange(700 * 1100, dtype=np.float32).reshape(700, 1100)
    return {
        "columns": big[:, 100:500],
        "transposed": big.T,
        "plain": big,
        "wide": np.broadcast_to(np.arange(300_000), (2, 300_000)),
        "leading": big.reshape(1, 1, 700, 1100)[..., 1:],
        "row": big[3:4, ::2],
        "one": np.array(7, np.int16),
    }


@pytest.mark.parametrize("engine", ENGINES, ids=IDS)
def test_chunks_of_any_strides_are_written_and_summed_up(tmp_path: Path, engine: Engine) -> None:
    every, held = [], views()
    for name, data in held.items():
        (tmp_path / name).mkdir()
        info = TensorInfo(dtype=str(data.dtype), shape=data.shape, chunk_shape=data.shape)
        every.append(ChunkData(array=name, info=info, number=0, data=data))
    storage = LocalStorage(tmp_path)
    assert list(engine.write(storage, every).wait()) == [
        zlib.crc32(data.tobytes()) for data in held.values()
    ]
    for chunk in every:
        file = tmp_path / chunk.array / chunk.info.grid.key(0)
        assert file.read_bytes() == held[chunk.array].tobytes()
    regions = [Region(array=c.array, info=c.info, box=c.info.grid.box(0)) for c in every]
    found: dict[int, Any] = {}
    engine.visit(storage, regions, lambda number, array: found.update({number: array.copy()}))
    assert sorted(found) == list(range(len(every)))
    assert all(np.array_equal(found[i], held[c.array]) for i, c in enumerate(every))


@pytest.mark.parametrize("engine", ENGINES, ids=IDS)
def test_a_visit_ends_with_what_goes_wrong(tmp_path: Path, engine: Engine) -> None:
    info = TensorInfo(dtype="int64", shape=(6,), chunk_shape=(2,))
    (tmp_path / "a").mkdir()
    storage = LocalStorage(tmp_path)
    data = np.zeros(2, np.int64)
    engine.write(
        storage, [ChunkData(array="a", info=info, number=n, data=data) for n in range(3)]
    ).wait()
    regions = [Region(array="a", info=info, box=info.grid.box(n)) for n in range(3)]

    def refuse(number: int, array: Any) -> None:
        raise KeyError(number)

    with pytest.raises(KeyError):
        engine.visit(storage, regions, refuse)
    (tmp_path / "a" / "c.1").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read chunk .*a/c\.1"):
        engine.visit(storage, regions, lambda number, array: None)


class Watching(FileEngine):
    """Keeps the chunks that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def write(self, storage: Storage, chunks: Iterable[ChunkData]) -> Writing:
        chunks = list(chunks)
        self.seen |= {f"{c.array.split('/', 1)[1]}#{c.number}": c.data for c in chunks}
        return super().write(storage, chunks)


def test_chunks_that_are_held_whole_are_written_from_where_they_are(tmp_path: Path) -> None:
    """No second copy of them: neither for rows and columns, nor transposed, nor from a shard."""
    values = {"a": torch.randn(8, 8), "b": torch.randn(8, 6).bfloat16(), "c": torch.randn(7, 3)}
    held = {
        "a": LayoutTensor(
            values["a"].T.contiguous(), TensorLayout.whole("m/a", (8, 8)).transposed()
        )
    }
    flat = [TensorLayout.whole(f"m/{key}", values[key].shape) for key in "bc"]
    for layout in flat:
        key = layout.fragments[0].name[2:]
        shard = LayoutTensor(values[key].flatten(), layout.reshaped((layout.numel,)))
        held[key] = shard
    engine = Watching()
    mcore_ckpt.save(tmp_path, step=1, tensors=held, chunk_bytes=64, engine=engine)
    own = {key: value.tensor.view(torch.uint8).numpy() for key, value in held.items()}
    alone = {
        name: any(np.shares_memory(data, of) for of in own.values())
        for name, data in engine.seen.items()
    }
    assert all(shared for name, shared in alone.items() if name[2] != "c")
    assert {name for name, shared in alone.items() if not shared} == {"m/c#1"}  # filled up
    for key, value in values.items():
        assert torch.equal(mcore_ckpt.open(tmp_path)[f"m/{key}"], value)


def test_checksums_without_the_fast_library(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(12).reshape(3, 4).T
    fast = checksums.checksum(array)
    real = builtins.__import__

    def refuse(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("zlib_ng"):
            raise ImportError(name)
        return real(name, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", refuse)
        assert importlib.reload(checksums).crc32 is zlib.crc32
        assert checksums.checksum(array) == fast == zlib.crc32(array.tobytes())
    importlib.reload(checksums)
