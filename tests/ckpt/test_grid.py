"""Chunks: bounded, aligned with the usual shards, and covering every element once."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.grid import DEFAULT_CHUNK_BYTES, Grid, chunk_shape
from mcore_parallel.layout import Box

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)
QUICK = settings(max_examples=60, deadline=None)


@QUICK
@given(SHAPES, st.sampled_from([1, 2, 4, 8]), st.integers(1, 500))
def test_chunks_are_bounded(shape: tuple[int, ...], itemsize: int, chunk_bytes: int) -> None:
    chunk = chunk_shape(shape, itemsize, chunk_bytes)
    assert math.prod(chunk) * itemsize <= max(itemsize, chunk_bytes)
    assert all(1 <= c <= max(1, n) for c, n in zip(chunk, shape, strict=True))
    if math.prod(max(1, n) for n in shape) * itemsize <= chunk_bytes:
        assert chunk == tuple(max(1, n) for n in shape)


@QUICK
@given(SHAPES, st.data())
def test_a_grid_covers_every_element_once(shape: tuple[int, ...], data: st.DataObject) -> None:
    chunk = tuple(data.draw(st.integers(1, max(1, n))) for n in shape)
    grid = Grid(shape, chunk)
    boxes = [grid.box(i) for i in range(grid.num_chunks)]
    assert sum(box.numel for box in boxes) == math.prod(shape)
    for i, box in enumerate(boxes):
        assert grid.number(grid.coordinates(i)) == i
        assert Box.whole(shape).contains(box)
        assert all(a % c == 0 for a, c in zip(box.start, chunk, strict=True))
    start = tuple(data.draw(st.integers(0, n)) for n in shape)
    size = tuple(data.draw(st.integers(0, n - a)) for a, n in zip(start, shape, strict=True))
    wanted = Box(start, size)
    expected = [i for i, box in enumerate(boxes) if box.intersect(wanted) and wanted.numel]
    assert sorted(grid.overlapping(wanted)) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), ()),
        ((0, 5), (1, 5)),
        ((192,), (192,)),
        ((192, 1024), (192, 1024)),
        ((1024, 1024), (512, 512)),
        ((4096, 4096), (512, 512)),
        ((14336, 4096), (1792, 512)),
        ((4096, 14336), (512, 1792)),
        ((8, 14336, 4096), (1, 1792, 512)),
        ((64, 1024, 512), (4, 1024, 512)),
        ((50257, 768), (1571, 96)),
    ],
)
def test_chunk_shapes_of_usual_tensors(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """The grid is part of no promise, but what it is should change on purpose only."""
    assert chunk_shape(shape, 4, DEFAULT_CHUNK_BYTES) == expected


@pytest.mark.parametrize("shape", [(4096, 4096), (14336, 4096), (4096, 14336), (8, 4096, 8192)])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_shards_of_a_matrix_are_whole_chunks(shape: tuple[int, ...], parts: int) -> None:
    chunk = chunk_shape(shape, 4)
    for dim in (-2, -1):
        assert shape[dim] // parts % chunk[dim] == 0


def test_keys() -> None:
    assert Grid((), ()).key(0) == "c"
    assert Grid((10, 10), (4, 5)).key(3) == "c.1.1"
