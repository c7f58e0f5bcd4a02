"""Random models under two random layouts: what is loaded is what was saved, bit for bit."""

import itertools
import math
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mcore_ckpt
from mcore_parallel.layout import Box, LayoutTensor, TensorLayout, check_tiling

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
RankLayouts = list[dict[str, TensorLayout]]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def random_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bit pattern, NaNs included."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(high, (math.prod(shape) * dtype.itemsize,), generator=generator)
    return raw.to(torch.uint8).view(dtype).view(shape)


@st.composite
def cuts(draw: st.DrawFn, size: int, parts: int) -> list[tuple[int, int]]:
    """Consecutive ranges, of any sizes, some of them empty."""
    inner = sorted(draw(st.integers(0, size)) for _ in range(parts - 1))
    edges = [0, *inner, size]
    return list(itertools.pairwise(edges))


@st.composite
def sharded(
    draw: st.DrawFn, whole: TensorLayout, num_ranks: int, replicas: int
) -> list[TensorLayout]:
    """The layouts of `num_ranks` ranks that hold `whole` together, `replicas` times over."""
    per_replica = num_ranks // replicas
    kind = draw(st.sampled_from(["dim", "flat", "dim then flat", "one", "boxes"]))
    if kind == "dim" and whole.shape:
        dim = draw(st.integers(0, len(whole.shape) - 1))
        parts = [whole.slice(dim, a, b) for a, b in draw(cuts(whole.shape[dim], per_replica))]
    elif kind == "dim then flat" and whole.shape and per_replica % 2 == 0:
        dim = draw(st.integers(0, len(whole.shape) - 1))
        parts = []
        for a, b in draw(cuts(whole.shape[dim], per_replica // 2)):
            part = whole.slice(dim, a, b)
            parts += [part.flat_range(c, d) for c, d in draw(cuts(part.numel, 2))]
    elif kind == "boxes" and len(whole.shape) > 1 and per_replica % 2 == 0:
        parts = []
        for a, b in draw(cuts(whole.shape[0], per_replica // 2)):
            rows = whole.slice(0, a, b)
            parts += [rows.slice(1, c, d) for c, d in draw(cuts(whole.shape[1], 2))]
    elif kind == "one":
        holder = draw(st.integers(0, per_replica - 1))
        parts = [
            whole if rank == holder else TensorLayout.padding((0,)) for rank in range(per_replica)
        ]
    else:
        parts = [whole.flat_range(a, b) for a, b in draw(cuts(whole.numel, per_replica))]
    return [part.replicated(r, replicas) for r in range(replicas) for part in parts]


@st.composite
def local_form(draw: st.DrawFn, layout: TensorLayout) -> TensorLayout:
    """The same elements, stored another way: transposed, or with padding rows."""
    form = draw(st.sampled_from(["plain", "transposed", "padded"]))
    if form == "transposed" and len(layout.shape) > 1:
        return layout.transposed(0, len(layout.shape) - 1)
    if form == "padded" and layout.shape:
        rows = TensorLayout.padding((draw(st.integers(1, 3)), *layout.shape[1:]))
        return TensorLayout.concat([layout, rows])
    return layout


@st.composite
def layouts(
    draw: st.DrawFn, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> RankLayouts:
    num_ranks = draw(st.integers(1, 6))
    ranks: RankLayouts = [{} for _ in range(num_ranks)]
    fused: dict[str, TensorLayout] = {}
    names = list(tensors)
    fuse: bool = draw(st.booleans())
    if tensors[names[0]][0] and fuse:  # gate and up as a fused weight
        parts = [TensorLayout.whole(name, tensors[name][0]) for name in names[:2]]
        fused["fused"] = TensorLayout.concat(parts)
        names = names[2:]
    wholes = fused | {name: TensorLayout.whole(name, tensors[name][0]) for name in names}
    for key, whole in wholes.items():
        replicas = draw(st.sampled_from([r for r in (1, 2, 3) if num_ranks % r == 0]))
        for rank, layout in enumerate(draw(sharded(whole, num_ranks, replicas))):
            ranks[rank][key] = draw(local_form(layout))
    check_tiling(layout for held in ranks for layout in held.values())
    return ranks


@st.composite
def models(draw: st.DrawFn) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    shape = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
    sometimes_empty = st.one_of(shape, shape, shape, st.sampled_from([(0,), (3, 0), (0, 2, 2)]))
    model: dict[str, Any] = {}
    first, dtype = draw(shape), draw(st.sampled_from(DTYPES))
    model["model/layers.0.mlp.gate.weight"] = (first, dtype)
    model["model/layers.0.mlp.up.weight"] = (first, dtype)
    for i in range(draw(st.integers(0, 3))):
        model[f"exp_avg/t{i}"] = (draw(sometimes_empty), draw(st.sampled_from(DTYPES)))
    return model


def local_tensors(
    ranks: RankLayouts, values: dict[str, torch.Tensor], *, filled: bool
) -> dict[str, LayoutTensor]:
    """All ranks' local tensors in one mapping, as if they were this process's own."""
    result = {}
    for rank, held in enumerate(ranks):
        for key, layout in held.items():
            names = [name for name in values if name == key or key == "fused"]
            dtype = values[names[0]].dtype
            local = random_tensor("rubbish", layout.shape, dtype)
            if filled:
                local.zero_()
                for fragment, view in layout.views(local):
                    view.copy_(values[fragment.name][fragment.box.slices])
            result[f"rank {rank}: {key}"] = LayoutTensor(local, layout)
    return result


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_layout_to_any_layout(data: st.DataObject) -> None:
    """U42–U45: any two layouts, uneven and zero-size shards, flat shards, replicas, padding."""
    model = data.draw(models(), label="model")
    source = data.draw(layouts(model), label="saved as")
    target = data.draw(layouts(model), label="loaded as")
    chunk_bytes = data.draw(st.sampled_from([16, 64, 1 << 20]), label="chunk bytes")
    values = {name: random_tensor(name, shape, dtype) for name, (shape, dtype) in model.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = mcore_ckpt.save(
            folder,
            step=7,
            tensors=local_tensors(source, values, filled=True),
            chunk_bytes=chunk_bytes,
            exchange_bytes=chunk_bytes * 3,
        )
        loaded = local_tensors(target, values, filled=False)
        mcore_ckpt.load(path, loaded)
        opened = mcore_ckpt.open(path)
        for name, value in values.items():
            if name not in opened:  # no layout needs to name a tensor without elements
                assert not value.numel()
                continue
            assert opened[name].dtype == value.dtype
            assert torch.equal(bits(opened[name]), bits(value)), name
        assert not mcore_ckpt.verify(Path(folder)).problems
    for held in loaded.values():
        expected = torch.zeros_like(held.tensor)
        for fragment, view in held.layout.views(expected):
            view.copy_(values[fragment.name][fragment.box.slices])
        assert torch.equal(bits(held.tensor), bits(expected))


def test_chunks_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    """The same tensors saved under two layouts give the same files, byte for byte."""
    value = torch.randn(12, 10)
    whole = TensorLayout.whole("model/w", (12, 10))
    rows = {f"{i}": whole.slice(0, 3 * i, 3 * i + 3) for i in range(4)}
    flat = {f"{i}": whole.flat_range(40 * i, 40 * i + 40) for i in range(3)}
    files = []
    for folder, held in (("a", rows), ("b", flat)):
        path = mcore_ckpt.save(
            tmp_path / folder,
            step=1,
            tensors=local_tensors([held_as("model/w", held)], {"model/w": value}, filled=True),
            chunk_bytes=128,
        )
        found = sorted(p for p in path.rglob("*") if p.is_file())
        files.append({str(p.relative_to(path)): p.read_bytes() for p in found})
    assert files[0] == files[1]
    assert sum(name.startswith("model/w/c.") for name in files[0]) > 2


def held_as(name: str, parts: dict[str, TensorLayout]) -> dict[str, TensorLayout]:
    """One layout of the parts one after the other, under the tensor's own name."""
    return {name: TensorLayout.concat([part.reshaped((part.numel,)) for part in parts.values()])}


def test_box_of_a_tensor(tmp_path: Path) -> None:
    value = torch.arange(60.0).view(6, 10)
    tensors = {"w": LayoutTensor(value, TensorLayout.whole("model/w", (6, 10)))}
    opened = mcore_ckpt.open(mcore_ckpt.save(tmp_path, step=0, tensors=tensors, chunk_bytes=64))
    box = Box((1, 3), (4, 5))
    assert torch.equal(opened.read("model/w", box), value[1:5, 3:8])
    assert opened.read("model/w", Box((2, 2), (0, 3))).shape == (0, 3)
