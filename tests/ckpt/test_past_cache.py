"""Chunks are written past the page cache where that can be, and are the same bytes where not."""

import errno
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_ckpt import CheckpointError, ChunkData, LocalStorage, Region, TensorInfo
from mcore_ckpt.file_engine import FileEngine
from mcore_ckpt.storage import DIRECT, LARGE, write_file
from mcore_parallel.layout import Box

pytestmark = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no O_DIRECT")
SHAPES = {
    "aligned": (512, 512),
    "with a tail": (300, 301),
    "odd rows in pieces": (4100, 75),
    "rows that no piece has aligned": (8, 33_001),
    "vector": (262_147,),
    "small": (8, 8),
}


class Calls:
    """What is asked of the system: flags of files that are created, writes that bypass the cache.

    refused: errors of calls that ask for that, by the call.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **refused: int) -> None:
        self.created: list[bool] = []
        self.direct = 0
        self.refused = refused
        self._bypassing: set[int] = set()
        self._open, self._write = os.open, os.write
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(os, "write", self.write)

    def open(self, path: Any, flags: int, *rest: int) -> int:
        direct = bool(flags & os.O_DIRECT)
        if flags & os.O_CREAT:
            self.created.append(direct)
        if direct and "open" in self.refused:
            raise OSError(self.refused["open"], os.strerror(self.refused["open"]), path)
        # The disk of the test may have no such thing: it is asked for, and then done without.
        descriptor = self._open(path, flags & ~os.O_DIRECT, *rest)
        self._bypassing.discard(descriptor)
        if direct:
            self._bypassing.add(descriptor)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        address = np.frombuffer(data, np.uint8).ctypes.data if len(data) else 0
        if descriptor in self._bypassing and not (len(data) % DIRECT or address % DIRECT):
            if "write" in self.refused:
                raise OSError(self.refused["write"], os.strerror(self.refused["write"]))
            self.direct += len(data)
        return self._write(descriptor, data)


def chunk_of(shape: tuple[int, ...], strided: bool) -> ChunkData:
    values = np.random.default_rng(0).integers(0, 1 << 30, shape, np.int32)
    if strided:
        wide = np.zeros((*shape[:-1], shape[-1] + 3), np.int32)
        wide[..., : shape[-1]] = values
        values = wide[..., : shape[-1]]
    info = TensorInfo(dtype="int32", shape=shape, chunk_shape=shape)
    return ChunkData(array="x", info=info, number=0, data=values)


def written(tmp_path: Path, chunk: ChunkData) -> bytes:
    (tmp_path / "x").mkdir(exist_ok=True)
    checksums = FileEngine().write(LocalStorage(tmp_path), [chunk]).wait()
    data = (tmp_path / "x" / chunk.info.grid.key(0)).read_bytes()
    assert checksums == [zlib.crc32(data)]
    return data


@pytest.mark.parametrize("strided", [False, True], ids=["whole", "strided"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_bytes_of_a_chunk(tmp_path: Path, shape: tuple[int, ...], strided: bool) -> None:
    chunk = chunk_of(shape, strided)
    assert written(tmp_path, chunk) == chunk.data.tobytes()


@pytest.mark.parametrize("kind", SHAPES)
def test_all_but_the_tail_bypasses_the_cache(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    chunk = chunk_of(SHAPES[kind], strided=False)
    assert written(tmp_path, chunk) == chunk.data.tobytes()
    if kind in ("small", "rows that no piece has aligned"):
        assert (calls.created, calls.direct) == ([False], 0)
    else:
        assert chunk.data.nbytes >= LARGE
        assert (calls.created, calls.direct) == ([True], chunk.data.nbytes // DIRECT * DIRECT)


@pytest.mark.parametrize(("call", "opened"), [("open", [True, False]), ("write", [True])])
def test_a_disk_that_has_nothing_of_it(
    tmp_path: Path, call: str, opened: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that the argument is invalid, at once or when something is written."""
    calls = Calls(monkeypatch, **{call: errno.EINVAL})
    chunk = chunk_of(SHAPES["with a tail"], strided=True)
    if call == "write":  # which ours does to each aligned block, also through the cache
        monkeypatch.setattr(os, "write", refusing_once(calls))
    assert written(tmp_path, chunk) == chunk.data.tobytes()
    assert calls.created == opened


def refusing_once(calls: Calls) -> Any:
    def write(descriptor: int, data: memoryview) -> int:
        if code := calls.refused.pop("write", 0):
            raise OSError(code, os.strerror(code))
        return calls.write(descriptor, data)

    return write


@pytest.mark.parametrize("call", ["open", "write"])
def test_a_full_disk_is_told(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Calls(monkeypatch, **{call: errno.ENOSPC})
    with pytest.raises(OSError, match=r"cannot write chunk .*x/c\.0\.0: No space left"):
        written(tmp_path, chunk_of(SHAPES["aligned"], strided=False))


def test_a_write_that_the_disk_cuts_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After part of a page, the rest goes through the cache."""
    real, sizes = os.write, []

    def short(descriptor: int, data: memoryview) -> int:
        sizes.append(len(data))
        return real(descriptor, data[: DIRECT + 512] if len(sizes) == 1 else data)

    memory = np.empty(4 * DIRECT, np.uint8)
    memory[:] = np.arange(4 * DIRECT) % 251
    calls = Calls(monkeypatch)
    monkeypatch.setattr(os, "write", short)
    write_file(str(tmp_path / "file"), [memory.data], past_cache=True)
    assert (tmp_path / "file").read_bytes() == memory.tobytes()
    assert (calls.created, sizes) == ([True], [4 * DIRECT, 3 * DIRECT - 512])


def test_large_reads_are_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that are needed, before they are read; that there is no file, the read tells."""
    chunk = chunk_of(SHAPES["aligned"], strided=False)
    written(tmp_path, chunk)
    announced, taken = [], []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _, start, size, __: announced.append((start, size))
    )
    boxes = [Box((128, 0), (256, 512)), Box((0, 0), (1, 512))]
    regions = [Region(array="x", info=chunk.info, box=box) for box in boxes]

    def take(number: int, data: Any) -> None:
        taken.append(np.array_equal(data, chunk.data[boxes[number].slices]))

    FileEngine().visit(LocalStorage(tmp_path), regions, take)
    assert taken == [True, True]
    assert announced == [(128 * 2048, 256 * 2048)]
    (tmp_path / "x" / "c.0.0").unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        FileEngine().visit(LocalStorage(tmp_path), regions, take)
