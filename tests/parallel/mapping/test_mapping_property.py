"""Random compositions of operators against the same operations on whole torch tensors."""

from collections.abc import Callable

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcore_parallel.layout import Box, LayoutTensor, TensorLayout
from mcore_parallel.mapping import (
    Concat,
    Exact,
    MappedReader,
    Operator,
    Rename,
    Reshape,
    Split,
    Stack,
    TensorMapping,
    TensorMeta,
    Transpose,
    Unstack,
    evaluate,
)

Values = dict[str, Tensor]


class Chain:
    """Operators and, computed by torch alone, what becomes of some tensors."""

    def __init__(self, values: Values) -> None:
        self.values = dict(values)
        self.operators: list[Operator] = []
        self._count = 0

    def new_name(self) -> str:
        self._count += 1
        return f"new{self._count}"

    def replace(self, operator: Operator, old: list[str], new: Values) -> None:
        self.operators.append(operator)
        for name in old:
            del self.values[name]
        self.values |= new


def flipped(tensors: list[Tensor]) -> list[Tensor]:
    """Not a movement of boxes: every element goes somewhere else."""
    return [tensor.flatten().flip(0).view(tensor.shape) for tensor in tensors]


def rename(draw: st.DrawFn, chain: Chain, name: str) -> None:
    new = chain.new_name()
    chain.replace(Rename(name, new), [name], {new: chain.values[name]})


def transpose(draw: st.DrawFn, chain: Chain, name: str) -> None:
    value = chain.values[name]
    dims = tuple(draw(st.permutations(range(value.dim()))))
    chain.replace(Transpose(name, dims), [name], {name: value.permute(dims)})


def reshape(draw: st.DrawFn, chain: Chain, name: str) -> None:
    value = chain.values[name]
    shape = tuple(value.shape)
    kind = draw(st.sampled_from(["flat", "merge", "cut"]))
    new: tuple[int, ...] = (value.numel(),)
    if kind == "merge" and len(shape) > 1:
        new = (shape[0] * shape[1], *shape[2:])
    if kind == "cut" and shape and shape[0] % 2 == 0:
        new = (2, shape[0] // 2, *shape[1:])
    chain.replace(Reshape(name, shape, new), [name], {name: value.reshape(new)})


def split(draw: st.DrawFn, chain: Chain, name: str) -> None:
    value = chain.values[name]
    if not value.dim():
        return
    dim = draw(st.integers(0, value.dim() - 1))
    cut = draw(st.integers(0, value.shape[dim]))
    sizes = (cut, value.shape[dim] - cut)
    names = (chain.new_name(), chain.new_name())
    parts = dict(zip(names, value.split(sizes, dim), strict=True))
    chain.replace(Split(name, names, sizes, dim), [name], parts)


def concat(draw: st.DrawFn, chain: Chain, name: str) -> None:
    value = chain.values[name]
    alike = [other for other, v in chain.values.items() if v.shape == value.shape]
    if not value.dim() or len(alike) < 2:
        return
    dim, new = draw(st.integers(0, value.dim() - 1)), chain.new_name()
    joined = {new: torch.cat([chain.values[other] for other in alike], dim)}
    chain.replace(Concat(tuple(alike), new, None, dim), alike, joined)


def stack(draw: st.DrawFn, chain: Chain, name: str) -> None:
    """Unstack, and stack again over another dimension."""
    value = chain.values[name]
    if not value.dim():
        return
    dim = draw(st.integers(0, value.dim() - 1))
    if not value.shape[dim]:
        return  # of no tensors nothing can be stacked: there is no shape
    base = chain.new_name()
    items = {f"{base}.{i}": v for i, v in enumerate(value.unbind(dim))}
    chain.replace(Unstack(name, base + ".{expert}", dim=dim), [name], items)
    if draw(st.booleans()):
        again, new = draw(st.integers(0, value.dim() - 1)), chain.new_name()
        stacked = {new: torch.stack(list(items.values()), again)}
        chain.replace(Stack(base + ".{expert}", new, dim=again), list(items), stacked)


def exact(draw: st.DrawFn, chain: Chain, name: str) -> None:
    new = chain.new_name()
    value = flipped([chain.values[name]])[0]
    operator = Exact((name,), (new,), flipped, flipped)  # type: ignore[arg-type]
    chain.replace(operator, [name], {new: value})


STEPS: list[Callable[[st.DrawFn, Chain, str], None]] = [
    rename, transpose, reshape, split, concat, stack, exact,
]  # fmt: skip


@st.composite
def chains(draw: st.DrawFn) -> tuple[Values, Chain]:
    theirs: Values = {}
    shapes = [tuple(draw(st.lists(st.integers(1, 4), max_size=3))) for _ in range(2)]
    for i in range(draw(st.integers(1, 3))):
        shape = torch.Size(draw(st.sampled_from(shapes)))
        theirs[f"their{i}"] = 100 * i + torch.arange(shape.numel()).view(shape)
    chain = Chain(theirs)
    for _ in range(draw(st.integers(1, 6))):
        name = draw(st.sampled_from(sorted(chain.values)))
        draw(st.sampled_from(STEPS))(draw, chain, name)
    return theirs, chain


def metas(values: Values) -> dict[str, TensorMeta]:
    return {name: TensorMeta(tuple(v.shape), v.dtype) for name, v in values.items()}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chains(), st.data())
def test_compositions(case: tuple[Values, Chain], data: st.DataObject) -> None:
    """Forward is torch's result, inverse the way back; a region reads itself and nothing else."""
    theirs, chain = case
    ours = {name: value.contiguous() for name, value in chain.values.items()}
    mapping = TensorMapping(chain.operators)
    forward = mapping.forward(metas(theirs))
    result = evaluate(forward, theirs)
    assert result.keys() == ours.keys()
    assert all(torch.equal(result[name], value) for name, value in ours.items())
    back = evaluate(mapping.inverse(metas(ours)), ours)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], value) for name, value in theirs.items())

    read: list[int] = []

    def counted(name: str, box: Box) -> Tensor:
        read.append(box.numel)
        return theirs[name][box.slices].clone()

    reader = MappedReader(forward, counted)
    for name, value in ours.items():
        start, shape = [], []
        for size in value.shape:
            start.append(data.draw(st.integers(0, max(size - 1, 0))))
            shape.append(data.draw(st.integers(min(size, 1), size - start[-1])))
        box = Box(tuple(start), tuple(shape))
        read.clear()
        assert torch.equal(reader.read(name, box), value[box.slices])
        if forward.is_plain(name):
            assert sum(read) == box.numel

    # A rank's part: some flat range of a transposed, padded tensor.
    name = data.draw(st.sampled_from(sorted(ours)))
    whole = TensorLayout.whole(name, tuple(ours[name].shape))
    if whole.shape:
        whole = TensorLayout.concat([whole, TensorLayout.padding((1, *whole.shape[1:]))])
    flat = whole.reshaped((whole.numel,))
    a = data.draw(st.integers(0, flat.numel))
    part = flat.flat_range(a, data.draw(st.integers(a, flat.numel)))
    local = torch.full(part.shape, -1)
    reader.fill(LayoutTensor(local, part.replicated(1, 3)))
    padded = torch.full((flat.numel,), -1)
    padded[: ours[name].numel()] = ours[name].flatten()
    assert torch.equal(local, padded[a : a + len(local)])
    moved = forward.translate(part.replicated(1, 3))
    assert all((f.replica, f.num_replicas) == (1, 3) for f in moved.fragments)
