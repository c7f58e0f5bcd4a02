"""Column- and row-parallel layers against one dense product, on every rank, by layout."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_parallel import Box, Group, Init, RngKey, TensorLayout, initialise, param_specs
from mcore_parallel.collectives import all_reduce
from mcore_parallel.layout import check_tiling
from mcore_parallel.layout.transfer import gather_layouts
from mcore_parallel.spec import fill_
from mcore_parallel.tensor import ColumnParallelLinear, Part, RowParallelLinear
from mcore_parallel.testing import RankPool

T, IN = 8, 6  # divisible by every size used, and not alike
HEADS, HEAD_DIM = 4, 3
INIT = Init(kind="normal", std=0.3)
BIAS_INIT = Init(kind="normal", std=0.2)
KEY = RngKey(11)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw: outputs, input gradient, and each parameter fragment's gradient."""

    y: Tensor
    bias: Tensor | None
    dx: Tensor
    grads: list[tuple[str, Box, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Case:
    options: dict[str, Any] = field(default_factory=dict)
    kv_heads: int | None = None  # fused q, k and v
    shape: tuple[int, ...] = (T,)

    @property
    def sequence_parallel(self) -> bool:
        return bool(self.options.get("sequence_parallel"))


def data(name: str, *shape: int) -> Tensor:
    """The same numbers under one name, in every process."""
    whole = torch.empty(shape, dtype=torch.float64)
    fill_(whole, TensorLayout.whole(name, shape), Init(kind="normal", std=1.0), RngKey(3))
    return whole


def whole_parameter(name: str, *shape: int) -> Tensor:
    whole = torch.empty(shape, dtype=torch.float64)
    fill_(whole, TensorLayout.whole(name, shape), INIT if len(shape) == 2 else BIAS_INIT, KEY)
    return whole.requires_grad_()


def my_rows(x: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    return x.chunk(group.size)[group.rank] if sequence_parallel else x


def prepare(layer: nn.Module, prefix: str, group: Group) -> None:
    """Fill by layout, biases too, and check that the ranks' layouts tile the global tensors."""
    specs = param_specs(layer, tp=group, sequence_parallel=False, prefix=prefix)
    specs = {k: replace(s, init=s.init if s.decay else BIAS_INIT) for k, s in specs.items()}
    initialise(dict(layer.named_parameters()), specs, KEY)
    layouts = gather_layouts({name: spec.layout for name, spec in specs.items()}, group)
    check_tiling(layout for by_name in layouts.values() for layout in by_name.values())


def gradients(layer: nn.Module, prefix: str, group: Group) -> list[tuple[str, Box, Tensor]]:
    """Each fragment's gradient, after the sums that the specs ask for."""
    result = []
    specs = param_specs(layer, tp=group, sequence_parallel=False, prefix=prefix)
    for name, param in layer.named_parameters():
        assert param.grad is not None
        flat = param.grad.view(-1)
        for sync in specs[name].grad_sync:
            flat[sync.start : sync.stop] = all_reduce(flat[sync.start : sync.stop], sync.group)
        for fragment, view in specs[name].layout.views(param.grad):
            result.append((fragment.name, fragment.box, view.cpu().clone()))
    return result


def heads_loss(q: Tensor, k: Tensor, v: Tensor, first_head: int) -> Tensor:
    """Each query head meets its own kv head, as in attention: k and v get sums over heads."""
    q, k, v = (x.unflatten(-1, (-1, HEAD_DIM)) for x in (q, k, v))
    group_size = q.shape[-2] // k.shape[-2]
    k, v = (x.repeat_interleave(group_size, dim=-2) for x in (k, v))
    factor = data("factor", T, HEADS, HEAD_DIM)[:, first_head : first_head + q.shape[-2]]
    return (factor * (q * k + v.sin())).sum()


def column(case: Case) -> Seen:
    group = Group.world()
    fused = case.kv_heads is not None
    shape: dict[str, Any] = {"out_features": HEADS * HEAD_DIM}
    if case.kv_heads is not None:
        kv = case.kv_heads
        counts = {"q": HEADS, "k": kv, "v": kv}
        shape = {"parts": [Part(name, n, HEAD_DIM) for name, n in counts.items()]}
    layer = ColumnParallelLinear(
        IN, **shape, group=group, bias=True, dtype=torch.float64, init=INIT, **case.options
    )
    prefix = "a.qkv" if fused else "a.up"
    prepare(layer, prefix, group)
    x = my_rows(data("x", *case.shape, IN), group, case.sequence_parallel).requires_grad_()
    result = layer(x)
    y, bias = result if isinstance(result, tuple) else (result, None)
    used = y if bias is None else y + bias
    if fused:
        first = 0 if layer.gather_output else group.rank * HEADS // group.size
        loss = heads_loss(*layer.split(used), first)
    else:
        dy = data("dy", *case.shape, HEADS * HEAD_DIM)
        if not layer.gather_output:
            dy = dy.chunk(group.size, dim=-1)[group.rank]
        loss = (used * dy).sum()
    loss.backward()
    assert x.grad is not None
    return Seen(
        y=y.detach().cpu(),
        bias=None if bias is None else bias.detach().cpu(),
        dx=x.grad.cpu(),
        grads=gradients(layer, prefix, group),
    )


def row(case: Case) -> Seen:
    group = Group.world()
    features = HEADS * HEAD_DIM
    layer = RowParallelLinear(
        features, IN, group=group, bias=True, dtype=torch.float64, init=INIT, **case.options
    )
    prepare(layer, "a.down", group)
    x = data("x", *case.shape, features)
    if layer.input_is_parallel:
        x = x.chunk(group.size, dim=-1)[group.rank].contiguous()
    x.requires_grad_()
    result = layer(x)
    y, bias = result if isinstance(result, tuple) else (result, None)
    used = y if bias is None else y + bias
    (used * my_rows(data("dy", *case.shape, IN), group, case.sequence_parallel)).sum().backward()
    assert x.grad is not None
    return Seen(
        y=y.detach().cpu(),
        bias=None if bias is None else bias.detach().cpu(),
        dx=x.grad.cpu(),
        grads=gradients(layer, "a.down", group),
    )


def on_gpu(layer: str, case: Case) -> Seen:
    with torch.device("cuda"):
        seen: Seen = {"column": column, "row": row}[layer](case)
    return seen


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-12, atol=1e-12)


def check_grads(seen: list[Seen], params: dict[str, Tensor]) -> None:
    for one in seen:
        assert {name for name, _, _ in one.grads} == set(params)
        for name, box, grad in one.grads:
            expected = params[name].grad
            assert expected is not None
            assert expected.abs().min() > 0, "a gradient of zero proves nothing"
            same(grad, expected[box.slices])


PLAIN = Case()
WIDE = Case(shape=(T, 2))
SEQUENCE = Case(options={"sequence_parallel": True})
COLUMN_CASES = {
    "plain": PLAIN,
    "sequence": SEQUENCE,
    "sequence-3d": replace(SEQUENCE, shape=(T, 2)),
    "3d": WIDE,
    "gather": Case(options={"gather_output": True}),
    "gather-sequence": Case(options={"gather_output": True, "sequence_parallel": True}),
    "bias-apart": Case(options={"skip_bias_add": True}),
    "bias-apart-gather": Case(options={"skip_bias_add": True, "gather_output": True}),
}
ROW_CASES = {
    "plain": PLAIN,
    "sequence": SEQUENCE,
    "sequence-3d": replace(SEQUENCE, shape=(T, 2)),
    "3d": WIDE,
    "whole-input": Case(options={"input_is_parallel": False}),
    "bias-apart": Case(options={"skip_bias_add": True}),
    "bias-apart-sequence": Case(options={"skip_bias_add": True, "sequence_parallel": True}),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", COLUMN_CASES.values(), ids=COLUMN_CASES.keys())
def test_column_equals_dense(ranks: RankPool, case: Case, size: int) -> None:
    seen = ranks.run(column, size, case)
    features = HEADS * HEAD_DIM
    weight = whole_parameter("a.up.weight", features, IN)
    bias = whole_parameter("a.up.bias", features)
    x = data("x", *case.shape, IN).requires_grad_()
    y = F.linear(x, weight, bias)
    (y * data("dy", *case.shape, features)).sum().backward()
    assert x.grad is not None
    if case.options.get("skip_bias_add"):
        y = y - bias
    whole = case.options.get("gather_output", False)
    for rank, one in enumerate(seen):
        same(one.y, y if whole else y.chunk(size, dim=-1)[rank])
        if one.bias is not None:
            same(one.bias, bias if whole else bias.chunk(size)[rank])
        same(one.dx, x.grad.chunk(size)[rank] if case.sequence_parallel else x.grad)
    check_grads(seen, {"a.up.weight": weight, "a.up.bias": bias})


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"gather_output": True}])
def test_fused_qkv_equals_dense(
    ranks: RankPool, kv_heads: int, size: int, options: dict[str, bool]
) -> None:
    """U51: kv heads fewer than ranks are shared, with the gradients of one process."""
    case = Case(options=options, kv_heads=kv_heads)
    seen = ranks.run(column, size, case)
    params = {}
    x = data("x", T, IN).requires_grad_()
    parts = []
    for name, heads in {"q": HEADS, "k": kv_heads, "v": kv_heads}.items():
        weight = whole_parameter(f"a.{name}.weight", heads * HEAD_DIM, IN)
        bias = whole_parameter(f"a.{name}.bias", heads * HEAD_DIM)
        params |= {f"a.{name}.weight": weight, f"a.{name}.bias": bias}
        parts.append(F.linear(x, weight, bias))
    heads_loss(*parts, 0).backward()
    assert x.grad is not None
    for rank, one in enumerate(seen):
        if options.get("gather_output"):
            expected = parts
        else:
            kv = kv_heads * HEAD_DIM // size if kv_heads >= size else HEAD_DIM
            start = rank * kv_heads // size * HEAD_DIM if kv_heads < size else rank * kv
            expected = [parts[0].chunk(size, dim=-1)[rank]]
            expected += [part[:, start : start + kv] for part in parts[1:]]
        same(one.y, torch.cat(expected, dim=-1))
        same(one.dx, x.grad.chunk(size)[rank] if case.sequence_parallel else x.grad)
    check_grads(seen, params)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", ROW_CASES.values(), ids=ROW_CASES.keys())
def test_row_equals_dense(ranks: RankPool, case: Case, size: int) -> None:
    seen = ranks.run(row, size, case)
    features = HEADS * HEAD_DIM
    weight = whole_parameter("a.down.weight", IN, features)
    bias = whole_parameter("a.down.bias", IN)
    x = data("x", *case.shape, features).requires_grad_()
    y = F.linear(x, weight, bias)
    (y * data("dy", *case.shape, IN)).sum().backward()
    assert x.grad is not None
    if case.options.get("skip_bias_add"):
        y = y - bias
    for rank, one in enumerate(seen):
        same(one.y, y.chunk(size)[rank] if case.sequence_parallel else y)
        assert (one.bias is None) == ("skip_bias_add" not in case.options)
        if one.bias is not None:
            same(one.bias, bias)
        parallel = case.options.get("input_is_parallel", True)
        same(one.dx, x.grad.chunk(size, dim=-1)[rank] if parallel else x.grad)
    check_grads(seen, {"a.down.weight": weight, "a.down.bias": bias})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", [PLAIN, SEQUENCE, Case(kv_heads=1)], ids=["plain", "sp", "qkv"])
def test_gpus_equal_the_cpu(ranks: RankPool, case: Case) -> None:
    size = next(n for n in (4, 2, 1) if n <= torch.cuda.device_count())
    layers = {"column": column} if case.kv_heads else {"column": column, "row": row}
    for name, body in layers.items():
        expected = ranks.run(body, size, case)
        for a, b in zip(ranks.run(on_gpu, size, name, case, device="cuda"), expected, strict=True):
            same(a.y, b.y)
            same(a.dx, b.dx)
            for (one, _, grad), (other, _, expected_grad) in zip(a.grads, b.grads, strict=True):
                assert one == other
                same(grad, expected_grad)


def test_layouts_of_any_tp_are_known_without_processes() -> None:
    layouts = []
    for rank in range(8):
        group = Group(rank, 8, tuple(range(8)))
        parts = [Part("q", 16, 2), Part("k", 2, 2)]
        layer = ColumnParallelLinear(IN, parts=parts, group=group, device="meta")
        spec = layer.param_specs("a.qkv")["weight"]
        layouts.append(spec.layout)
        (sync,) = spec.grad_sync
        assert sync.group.ranks == ((0, 1, 2, 3) if rank < 4 else (4, 5, 6, 7))
        assert (sync.start, sync.stop) == (4 * IN, 6 * IN)
    check_tiling(layouts)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda group: ColumnParallelLinear(IN, 10, group=group),
            "ColumnParallelLinear: out_features is 10, which is not divisible by tp=4; "
            "the nearest valid tp is 5",
        ),
        (
            lambda group: RowParallelLinear(6, IN, group=group),
            "RowParallelLinear: in_features is 6, which is not divisible by tp=4; "
            "the nearest valid tp is 3",
        ),
        (
            lambda group: ColumnParallelLinear(
                IN, parts=[Part("q", 6, 2), Part("k", 3, 2)], group=group
            ),
            "ColumnParallelLinear: part 'q' has 6 units, which is not divisible by tp=4; "
            "the nearest valid tp is 3",
        ),
        (
            lambda group: ColumnParallelLinear(
                IN, parts=[Part("q", 12, 2), Part("k", 3, 2)], group=group
            ),
            "ColumnParallelLinear: part 'k' has 3 units, which is not a divisor of tp=4; "
            "the nearest valid tp is 3",
        ),
        (
            lambda group: ColumnParallelLinear(IN, parts=[Part("q", 0, 2)], group=group),
            "ColumnParallelLinear: part 'q' has 0 units of 2 features; both must be at least 1",
        ),
        (
            lambda group: ColumnParallelLinear(IN, group=group),
            "ColumnParallelLinear: give either out_features or parts",
        ),
        (
            lambda group: RowParallelLinear(
                8, IN, group=group, input_is_parallel=False, sequence_parallel=True
            ),
            "RowParallelLinear: sequence_parallel=True needs input_is_parallel=True, since an "
            "input that is whole on every rank is not cut along the tokens",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_with_the_numbers(build: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        build(Group(1, 4, (0, 1, 2, 3)))
    assert str(error.value) == message


def test_tokens_that_cannot_be_cut_are_refused_before_any_collective() -> None:
    """U02, at the layer: 10 tokens over tp 4 (the group here could not communicate)."""
    layer = RowParallelLinear(8, IN, group=Group(0, 4, (0, 1, 2, 3)), sequence_parallel=True)
    with pytest.raises(ValueError, match=r"cannot cut 10 tokens over tp=4; .* number is 8"):
        layer(torch.zeros(10, 2))
