"""Layout operations against the same operations on a tensor that holds every element's identity."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.layout import Box, Fragment, LayoutTensor, TensorLayout

PADDING = -1


def identities(layout: TensorLayout) -> torch.Tensor:
    """The local tensor whose elements say which global element they are."""
    local = torch.full(layout.shape, PADDING, dtype=torch.int64)
    for fragment, view in layout.views(local):
        start = 1_000_000 * int(fragment.name.removeprefix("t"))
        whole = torch.arange(start, start + math.prod(fragment.global_shape))
        assert (view == PADDING).all(), "fragments share local elements"
        view.copy_(whole.view(fragment.global_shape)[fragment.box.slices])
    return local


@st.composite
def leaves(draw: st.DrawFn, number: int, local_shape: tuple[int, ...]) -> TensorLayout:
    """A box of a somewhat larger tensor, or padding, of a given local shape."""
    if draw(st.integers(0, 5)) == 0:
        return TensorLayout.padding(local_shape)
    start = tuple(draw(st.integers(0, 2)) for _ in local_shape)
    after = [draw(st.integers(0, 2)) for _ in local_shape]
    shape = tuple(a + n + b for a, n, b in zip(start, local_shape, after, strict=True))
    return TensorLayout.box(f"t{number}", shape, Box(start, local_shape))


class Pair:
    """A layout and its table of identities, changed in step."""

    def __init__(self, layout: TensorLayout) -> None:
        self.layout = layout
        self.table = identities(layout)

    def step(self, data: st.DataObject, numbers: "itertools.count[int]") -> None:
        draw, shape = data.draw, self.layout.shape
        dim = draw(st.integers(0, len(shape) - 1))
        op = draw(st.sampled_from(["concat", "interleave", "permute", "slice", "flat", "reshape"]))
        if op == "concat":
            rows = draw(st.integers(0, 3))
            other = draw(leaves(next(numbers), (*shape[:dim], rows, *shape[dim + 1 :])))
            self.layout = TensorLayout.concat([self.layout, other], dim)
            self.table = torch.cat([self.table, identities(other)], dim)
        elif op == "interleave":
            divisors = [d for d in range(1, shape[dim] + 1) if shape[dim] % d == 0]
            if not divisors:
                return
            block = draw(st.sampled_from(divisors))
            other_block = draw(st.integers(1, 2))
            count = shape[dim] // block
            other_shape = (*shape[:dim], count * other_block, *shape[dim + 1 :])
            other = draw(leaves(next(numbers), other_shape))
            self.layout = TensorLayout.interleaved(
                [self.layout, other], [block, other_block], dim - len(shape)
            )
            mine = torch.split(self.table, block, dim)
            theirs = torch.split(identities(other), other_block, dim)
            self.table = torch.cat(
                [t for pair in zip(mine, theirs, strict=True) for t in pair], dim
            )
        elif op == "permute":
            dims = draw(st.permutations(range(len(shape))))
            self.layout = self.layout.permuted(dims)
            self.table = self.table.permute(dims).contiguous()
        elif op == "slice":
            start = draw(st.integers(0, shape[dim]))
            stop = draw(st.integers(start, shape[dim]))
            self.layout = self.layout.slice(dim, start, stop)
            self.table = self.table.narrow(dim, start, stop - start).contiguous()
        elif op == "flat":
            start = draw(st.integers(0, self.layout.numel))
            stop = draw(st.integers(start, self.layout.numel))
            self.layout = self.layout.flat_range(start, stop)
            self.table = self.table.flatten()[start:stop]
        else:
            sizes = [d for d in range(1, self.layout.numel + 1) if self.layout.numel % d == 0]
            size = draw(st.sampled_from(sizes)) if sizes else 1
            self.layout = self.layout.reshaped((size, self.layout.numel // size))
            self.table = self.table.reshape(size, -1) if sizes else self.table.reshape(1, 0)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_every_chain_of_operations_moves_elements_as_torch_does(data: st.DataObject) -> None:
    numbers = itertools.count()
    dims = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.integers(0, 5)) for _ in range(dims))
    pair = Pair(data.draw(leaves(next(numbers), shape)))
    for _ in range(data.draw(st.integers(1, 5))):
        pair.step(data, numbers)
        assert pair.layout.shape == tuple(pair.table.shape)
        assert torch.equal(identities(pair.layout), pair.table)
    assert pair.layout.covered == int((pair.table != PADDING).sum())


def fused_qkv() -> TensorLayout:
    """Tensor rank 1 of 2: 4 query heads, 2 kv heads, head size 64, hidden 256."""
    prefix = "layers.3.attention"
    q = TensorLayout.box(f"{prefix}.q.weight", (256, 256), Box((128, 0), (128, 256)))
    k = TensorLayout.box(f"{prefix}.k.weight", (128, 256), Box((64, 0), (64, 256)))
    v = TensorLayout.box(f"{prefix}.v.weight", (128, 256), Box((64, 0), (64, 256)))
    return TensorLayout.concat([q, k, v])


def test_the_fused_weight_of_one_tensor_rank_is_three_fragments() -> None:
    layout = fused_qkv()
    assert layout.shape == (256, 256)
    assert [
        (f.name[-8:], f.global_shape, f.box, f.offset, f.strides) for f in layout.fragments
    ] == [
        ("q.weight", (256, 256), Box((128, 0), (128, 256)), 0, (256, 1)),
        ("k.weight", (128, 256), Box((64, 0), (64, 256)), 128 * 256, (256, 1)),
        ("v.weight", (128, 256), Box((64, 0), (64, 256)), 192 * 256, (256, 1)),
    ]


def test_a_flat_shard_of_the_fused_weight_is_a_few_boxes_of_k_and_v() -> None:
    shard = fused_qkv().flat_range(40_000, 50_000)
    assert shard.shape == (10_000,)
    # 40,000 is local row 156, column 64: k row 64 + 28; 49,152 is the first element of v.
    assert [(f.name[-8:], f.box, f.offset) for f in shard.fragments] == [
        ("k.weight", Box((92, 64), (1, 192)), 0),
        ("k.weight", Box((93, 0), (35, 256)), 192),
        ("v.weight", Box((64, 0), (3, 256)), 9_152),
        ("v.weight", Box((67, 0), (1, 80)), 9_920),
    ]
    assert shard.covered == 10_000


def test_gate_and_up_row_by_row_stay_one_strided_fragment_each() -> None:
    gate = TensorLayout.whole("gate", (6, 4))
    up = TensorLayout.whole("up", (6, 4))
    layout = TensorLayout.interleaved([gate, up], [1, 1])
    assert [(f.name, f.offset, f.strides) for f in layout.fragments] == [
        ("gate", 0, (8, 1)),
        ("up", 4, (8, 1)),
    ]
    with pytest.raises(ValueError, match=r"sizes \[6, 4\] along dimension 0 are not one number"):
        TensorLayout.interleaved([gate, TensorLayout.whole("up", (4, 4))], [1, 1])


def test_a_transposed_weight_stays_one_fragment() -> None:
    layout = TensorLayout.whole("w", (6, 4)).transposed()
    (fragment,) = layout.fragments
    assert (layout.shape, fragment.box, fragment.strides) == ((4, 6), Box.whole((6, 4)), (1, 6))


def test_views_write_through_to_parameters_that_need_gradients() -> None:
    weight = torch.nn.Parameter(torch.zeros(256, 256))
    for fragment, view in LayoutTensor(weight, fused_qkv()).views():
        view.fill_({"q": 1.0, "k": 2.0, "v": 3.0}[fragment.name[-8]])
    assert weight.detach()[:, 0].tolist() == [1.0] * 128 + [2.0] * 64 + [3.0] * 64


def test_views_start_where_a_slice_of_a_larger_buffer_starts() -> None:
    buffer = torch.zeros(100)
    (_, view) = next(TensorLayout.whole("w", (2, 3)).views(buffer[40:46].view(2, 3)))
    view.fill_(1.0)
    assert buffer.nonzero().flatten().tolist() == list(range(40, 46))


def test_replicas_multiply_over_axes_and_the_primary_is_one_of_them() -> None:
    layouts = [
        TensorLayout.whole("w", (3,)).replicated(tp, 2).replicated(dp, 3)
        for tp in range(2)
        for dp in range(3)
    ]
    assert [x.fragments[0].replica for x in layouts] == list(range(6))
    assert {x.fragments[0].num_replicas for x in layouts} == {6}
    assert [len(x.primary().fragments) for x in layouts] == [1, 0, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="replica index 3 must lie in 0…2"):
        layouts[0].replicated(3, 3)


def test_renaming_keeps_the_rest() -> None:
    layout = fused_qkv()
    renamed = layout.renamed(lambda name: f"exp_avg/{name}")
    assert renamed.names() == tuple(f"exp_avg/{name}" for name in layout.names())
    assert renamed.renamed(lambda name: name.removeprefix("exp_avg/")) == layout


def test_an_empty_box_leaves_no_fragment_but_an_empty_tensor_keeps_its_name() -> None:
    assert TensorLayout.box("w", (4, 3), Box((4, 0), (0, 3))).fragments == ()
    assert TensorLayout.whole("empty", (0, 3)).names() == ("empty",)
    assert fused_qkv().flat_range(7, 7) == TensorLayout(shape=(0,), fragments=())
    assert fused_qkv().slice(0, 256, 256).shape == (0, 256)


def fragment(**changes: object) -> Fragment:
    values: dict[str, object] = {
        "name": "w",
        "global_shape": (4, 6),
        "box": Box((0, 0), (2, 6)),
        "offset": 0,
        "strides": (6, 1),
    }
    return Fragment(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"box": Box((3, 0), (2, 6))}, r"w: box \[3:5, 0:6\] leaves the global shape \[4, 6\]"),
        ({"strides": (6,)}, "differ in number of dimensions"),
        ({"strides": (0, 1)}, "must be positive where the box is longer than 1"),
        ({"strides": (-6, 1)}, "must be positive"),
        ({"replica": 2, "num_replicas": 2}, "w: replica 2 must lie in 0…1"),
    ],
)
def test_a_fragment_that_makes_no_sense_is_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fragment(**changes)


@pytest.mark.parametrize("offset", [-1, 1])
def test_fragments_may_not_leave_the_local_tensor(offset: int) -> None:
    assert TensorLayout(shape=(2, 6), fragments=(fragment(),)).covered == 12
    message = f"w: local addresses {offset}…{offset + 11} of box .* leave the 12 elements"
    with pytest.raises(ValueError, match=message):
        TensorLayout(shape=(2, 6), fragments=(fragment(offset=offset),))


def test_operations_refuse_what_lies_outside() -> None:
    layout = TensorLayout.whole("w", (4, 6))
    with pytest.raises(ValueError, match="flat range 3:25 leaves the 24 local elements"):
        layout.flat_range(3, 25)
    with pytest.raises(ValueError, match="slice 2:5 leaves the 4 elements of dimension 0"):
        layout.slice(0, 2, 5)
    with pytest.raises(ValueError, match="dimension 2 of a local tensor of 2 dimensions"):
        layout.slice(2, 0, 1)
    with pytest.raises(ValueError, match=r"local shape \[4, 6\] does not reshape to \[5, 5\]"):
        layout.reshaped((5, 5))
    with pytest.raises(ValueError, match=r"\[0, 0\] is no permutation"):
        layout.permuted((0, 0))
    with pytest.raises(ValueError, match=r"\[4, 6\] and \[4, 5\] differ elsewhere than along"):
        TensorLayout.concat([layout, TensorLayout.whole("v", (4, 5))])
    with pytest.raises(ValueError, match="at least one layout"):
        TensorLayout.concat([])


def test_views_refuse_tensors_that_the_layout_does_not_describe() -> None:
    layout = TensorLayout.whole("w", (4, 6))
    with pytest.raises(ValueError, match=r"shape \[6, 4\] for a layout of shape \[4, 6\]"):
        list(layout.views(torch.zeros(6, 4)))
    with pytest.raises(ValueError, match="contiguous"):
        list(layout.views(torch.zeros(6, 4).t()))
    with pytest.raises(ValueError, match=r"shape \[24\] for a layout of shape \[4, 6\] \(w\)"):
        LayoutTensor(torch.zeros(24), layout)
