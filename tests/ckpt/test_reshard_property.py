"""Random models under two random layouts: what arrives is what was there, bit for bit.

Through a checkpoint, and in memory between live ranks.
"""

import itertools
import math
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import mcore_ckpt
from mcore_ckpt.dtypes import converts
from mcore_ckpt.live import LiveTransfer
from mcore_parallel.group import Group
from mcore_parallel.layout import Box, LayoutTensor, TensorLayout, check_tiling
from mcore_parallel.testing import RankPool

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
Model = dict[str, tuple[tuple[int, ...], torch.dtype]]
EXAMPLES, LIVE_EXAMPLES = (500, 500) if os.environ.get("NIGHTLY") else (40, 25)


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
    ranks: RankLayouts,
    values: dict[str, torch.Tensor],
    *,
    filled: bool,
    dtypes: dict[str, torch.dtype] | None = None,
) -> dict[str, LayoutTensor]:
    """All ranks' local tensors in one mapping, as if they were this process's own."""
    result = {}
    for rank, held in enumerate(ranks):
        for key, layout in held.items():
            names = [name for name in values if name == key or key == "fused"]
            dtype = values[names[0]].dtype if dtypes is None else dtypes[names[0]]
            local = random_tensor("rubbish", layout.shape, dtype)
            if filled:
                local.zero_()
                for fragment, view in layout.views(local):
                    view.copy_(values[fragment.name][fragment.box.slices])
            result[f"rank {rank}: {key}"] = LayoutTensor(local, layout)
    return result


@st.composite
def other_dtypes(draw: st.DrawFn, model: Model) -> dict[str, torch.dtype]:
    """For each tensor the dtype it is wanted in: its own, or one that it converts to.

    Tensors that may be fused into one stay alike.
    """
    wanted: dict[str, torch.dtype] = {}
    alike: dict[torch.dtype, torch.dtype] = {}
    for name, (_, dtype) in model.items():
        options = [dtype, *(other for other in DTYPES if converts(dtype, other))]
        chosen = draw(st.sampled_from(options))
        wanted[name] = alike.setdefault(dtype, chosen) if name.startswith("model/") else chosen
    return wanted


def check_arrived(held: LayoutTensor, values: dict[str, torch.Tensor]) -> None:
    """Bit for bit in the same dtype; through another, every value rounded once (NaNs as NaNs)."""
    expected = torch.zeros_like(held.tensor)
    for fragment, view in held.layout.views(expected):
        view.copy_(values[fragment.name][fragment.box.slices])
    same_dtype = all(values[name].dtype == held.tensor.dtype for name in held.layout.names())
    if same_dtype:
        assert torch.equal(bits(held.tensor), bits(expected))
    else:
        assert torch.equal(held.tensor.double().nan_to_num(7.5), expected.double().nan_to_num(7.5))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_layout_to_any_layout(data: st.DataObject) -> None:
    """U42–U45: any two layouts, uneven and zero-size shards, flat shards, replicas, padding."""
    model = data.draw(models(), label="model")
    source = data.draw(layouts(model), label="saved as")
    target = data.draw(layouts(model), label="loaded as")
    dtypes = data.draw(other_dtypes(model), label="dtypes")
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
        loaded = local_tensors(target, values, filled=False, dtypes=dtypes)
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
        check_arrived(held, values)


WORLD = 6


def move(
    model: Model,
    dtypes: dict[str, torch.dtype],
    source: RankLayouts,
    target: RankLayouts,
    shift: int,
    max_bytes: int,
) -> None:
    """From the first ranks into `target`, whose ranks begin at `shift` (and wrap around)."""
    group = Group.world()
    values = {name: random_tensor(name, shape, dtype) for name, (shape, dtype) in model.items()}
    give = source[group.rank : group.rank + 1]
    place = (group.rank - shift) % WORLD
    take = target[place : place + 1]
    held = local_tensors(take, values, filled=False, dtypes=dtypes)
    for value in held.values():  # a transfer leaves padding alone
        value.tensor.zero_()
    sources = local_tensors(give, values, filled=True)
    link = LiveTransfer(sources, held, group, max_bytes=max_bytes)
    link(verify=max_bytes == 64)
    for value in held.values():
        check_arrived(value, values)


@pytest.mark.timeout(300 + 2 * LIVE_EXAMPLES)
@settings(
    max_examples=LIVE_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.reuse, Phase.generate],  # shrinking over live ranks would take minutes
)
@given(data=st.data())
def test_any_layout_to_any_layout_in_memory(ranks: RankPool, data: st.DataObject) -> None:
    """The same between live ranks: the same ones, others, or some of both."""
    model = data.draw(models(), label="model")
    source = data.draw(layouts(model), label="from")
    target = data.draw(layouts(model), label="to")
    dtypes = data.draw(other_dtypes(model), label="dtypes")
    shift = data.draw(st.integers(0, WORLD - 1), label="shift")
    max_bytes = data.draw(st.sampled_from([1, 64, 1 << 20]), label="max bytes")
    ranks.run(move, WORLD, model, dtypes, source, target, shift, max_bytes)


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
