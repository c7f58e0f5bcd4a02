"""Operators of mixtures of experts: the arguments on which they are compared, and how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.ops.moe_permute.assignment import DROPPED, Assignment
from mcore_kernels.ops.moe_route.rule import RoutingRule
from mcore_kernels.protocols import accumulation_dtype
from mcore_kernels.testing.case import Case, Make, scattered, slice_of_rows, with_nan
from mcore_kernels.testing.compare import assert_close


def moe_route(make: Make) -> Iterator[Case]:
    """Cases of the router."""

    def case(name: str, logits: Tensor, **rule: Any) -> Case:
        correction = rule.pop("correction", None)
        arguments = {"logits": logits, "correction": correction, "rule": RoutingRule(**rule)}
        return Case(name=name, arguments=arguments, grads=("logits",), fixed=("correction",))

    for score in ("softmax", "sigmoid", "sqrt_softplus"):
        yield case(score, make(9, 8), top_k=2, score=score)
        yield case(f"{score}, normalised", make(9, 8), top_k=3, score=score, normalise=True)
    yield case("corrected", make(9, 8), top_k=2, score="sigmoid", correction=make(8), scale=2.5)
    deepseek = {"num_groups": 4, "top_groups": 2, "correction": make(16), "normalise": True}
    yield case("groups", make(7, 16), top_k=4, score="sigmoid", **deepseek)
    yield case("best of a group", make(7, 16), top_k=4, num_groups=4, top_groups=2, per_group=1)
    yield case("in float64", make(7, 6), top_k=2, float64=True)
    yield case("all experts", make(3, 5), top_k=5)
    yield case("one expert", make(3, 1), top_k=1, normalise=True)
    yield case("equal logits", make(4, 6).mul(0.5).round(), top_k=3)
    yield case("no tokens", make(0, 5), top_k=2)
    yield case("no tokens, groups", make(0, 8), top_k=2, num_groups=4, top_groups=2)
    for score in ("sigmoid", "sqrt_softplus"):
        vanishing = make(5, 6)
        vanishing[:, ::2] -= 1e3
        yield case(f"{score} of almost nothing", vanishing, top_k=4, score=score, normalise=True)
    yield case("scattered", scattered(make(5, 6)), top_k=2, score="sigmoid")
    yield case("large values", make(5, 6, scale=1e3), top_k=2, normalise=True)
    yield case("NaN", with_nan(make(5, 6)), top_k=2)


def moe_permute(make: Make) -> Iterator[Case]:
    """Cases of the permutation."""

    def case(name: str, x: Tensor, experts: Tensor, num_experts: int, **more: Any) -> Case:
        arguments: dict[str, Any] = {"x": x, "weights": make(*experts.shape), "experts": experts}
        return Case(
            name=name, arguments={**arguments, "num_experts": num_experts}, grads=(), **more
        )

    def chosen(tokens: int, top_k: int, num_experts: int) -> Tensor:
        return make(tokens, num_experts).argsort(-1)[:, :top_k]

    dropped = chosen(5, 2, 4)
    dropped[1] = DROPPED
    dropped[3:, 0] = DROPPED
    yield case("plain", make(5, 16), chosen(5, 2, 4), 4)
    yield case("odd sizes", make(4, 5), chosen(4, 3, 5), 5, fixed=("weights",))
    yield case("one copy", make(3, 6), chosen(3, 1, 3), 3)
    yield case("dropped copies", make(5, 5), dropped, 4)
    yield case("everything dropped", make(3, 4), torch.full((3, 2), DROPPED), 4)
    yield case("empty experts", make(4, 4), torch.full((4, 1), 2), 5)
    yield case("no tokens", make(0, 4), chosen(0, 2, 3), 3)
    yield case("scattered", scattered(make(3, 6)), chosen(3, 2, 4), 4)
    yield case("slice of rows", slice_of_rows(make(3, 6)), chosen(3, 2, 4), 4)
    yield case("large values", make(3, 6, scale=1e3), chosen(3, 2, 4), 4)
    yield case("NaN", with_nan(make(3, 6)), chosen(3, 2, 4), 4)


def grouped_linear(make: Make) -> Iterator[Case]:
    """Cases of the grouped linear operator."""

    def case(name: str, x: Tensor, out: int, counts: Any, **more: Any) -> Case:
        weight = more.pop("weight", None)
        weight = make(len(counts), out, x.shape[1]) if weight is None else weight
        arguments = {"x": x, "weight": weight, "counts": counts}
        floor = 1.0 if x.shape[1] < 64 else 8.0  # partial sums grow as the root of their terms
        return Case(name=name, arguments=arguments, grads=("x", "weight"), floor=floor, **more)

    yield case("plain", make(20, 16), 24, (6, 4, 10))
    yield case("odd sizes", make(13, 7), 11, (5, 1, 7))
    yield case("empty experts", make(9, 8), 8, (0, 4, 0, 0, 5, 0))
    yield case("one expert has all", make(9, 8), 16, (0, 9, 0))
    yield case("no tokens", make(0, 8), 8, (0, 0))
    yield case("counts on the device", make(9, 8), 8, torch.tensor([4, 0, 5]))
    yield case("scattered", scattered(make(9, 8)), 8, (4, 5))
    weight = make(2, 8, 16).transpose(1, 2)
    yield case("weights lying transposed", slice_of_rows(make(9, 8)), 16, (4, 5), weight=weight)
    yield case("expanded gradient", make(9, 8), 8, (4, 5), expanded=True)
    yield case("many rows", make(150, 40), 70, (130, 20))
    yield case("large values", make(9, 8, scale=1e3), 8, (4, 5))
    yield case("NaN in one expert", with_nan(make(9, 8)), 8, (4, 5))
    yield case("whole tiles", make(300, 64), 128, (130, 0, 1, 64, 105))
    yield case("NaN beside whole tiles", with_nan(make(170, 64)), 256, (40, 130))


def compare_route(op: Any, arguments: dict[str, Any], wide: dict[str, Any], label: str) -> None:
    """Choices exactly, weights and scores and their gradients within rounding."""
    rule: RoutingRule = arguments["rule"]
    logits = arguments["logits"].detach().requires_grad_()
    found = op(logits, arguments["correction"], rule=rule)
    z = wide["logits"].requires_grad_()
    wanted = route_by_formula(z, wide["correction"], rule)
    assert torch.equal(found[1], wanted[1]), f"{label}: other experts were chosen"
    dtype = torch.float64 if rule.float64 else accumulation_dtype(logits.dtype)
    seed = (torch.arange(z.numel(), device=z.device).view_as(z) % 7 - 3) / 4
    for i, name in ((0, "weights"), (2, "scores")):
        assert_close(found[i], wanted[i].detach(), dtype=dtype, slack=4.0, label=f"{label}: {name}")
        grad = seed[:, : found[i].shape[1]]
        (got,) = torch.autograd.grad(found[i], logits, grad.to(dtype), retain_graph=True)
        (exact,) = torch.autograd.grad(wanted[i], z, grad.double(), retain_graph=True)
        assert_close(
            got, exact, dtype=logits.dtype, slack=8.0, floor=1.0,
            label=f"{label}: gradient through {name}",
        )  # fmt: skip


def _root(x: Tensor) -> Tensor:
    """√x, with the slope 0 at 0."""
    return torch.where(x == 0, x, torch.where(x == 0, 1.0, x).sqrt())


def route_by_formula(
    logits: Tensor, correction: Tensor | None, rule: RoutingRule
) -> tuple[Tensor, Tensor, Tensor]:
    """The rule once more, token by token."""
    exp = (logits - logits.detach().amax(-1, keepdim=True)).exp()
    scores = {
        "softmax": exp / exp.sum(-1, keepdim=True),
        "sigmoid": (-torch.logaddexp(-logits, torch.zeros_like(logits))).exp(),
        "sqrt_softplus": _root(torch.logaddexp(logits, torch.zeros_like(logits))),
    }[rule.score]
    values = (scores if correction is None else scores + correction).tolist()
    if correction is None and rule.num_groups == 1:
        values = logits.tolist()
    chosen = []
    for of_token in values:
        size = len(of_token) // rule.num_groups
        quality = []
        for group in range(rule.num_groups):
            best = sorted(of_token[group * size : (group + 1) * size], reverse=True)
            quality.append(sum(best[: rule.best_of_group]))
        groups = sorted(range(rule.num_groups), key=lambda g: -quality[g])[: rule.top_groups]
        able = [e for e in range(len(of_token)) if e // size in groups]
        # NaN counts as the largest, as torch sorts it.
        able.sort(key=lambda e: (of_token[e] == of_token[e], -of_token[e], e))
        chosen.append(able[: rule.top_k])
    experts = torch.tensor(chosen, dtype=torch.int64, device=logits.device)
    experts = experts.view(len(values), rule.top_k)
    weights = scores.gather(-1, experts)
    if rule.normalise and rule.score == "softmax":
        of_chosen = logits.gather(-1, experts)
        weights = (of_chosen - of_chosen.logsumexp(-1, keepdim=True)).exp()
    elif rule.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * rule.scale, experts, scores


def compare_permute(op: Any, arguments: dict[str, Any], wide: dict[str, Any], label: str) -> None:
    """There and back, weighted and not, with gradients."""
    experts, num_experts = arguments["experts"], arguments["num_experts"]
    dropped = bool((experts == DROPPED).any())
    assignment = Assignment.of(experts, num_experts, has_dropped=dropped)
    copies = [
        (e, t, j)
        for t, row in enumerate(experts.tolist())
        for j, e in enumerate(row)
        if e != DROPPED
    ]
    copies.sort(key=lambda copy: copy[0])
    tokens = torch.tensor([t for _, t, _ in copies], dtype=torch.int64, device=experts.device)
    slots = torch.tensor([j for _, _, j in copies], dtype=torch.int64, device=experts.device)
    counts = [sum(e == expert for e, _, _ in copies) for expert in range(num_experts)]
    assert assignment.counts.tolist() == counts, f"{label}: counts"

    x, wx = arguments["x"].detach().requires_grad_(), wide["x"].requires_grad_()
    weights, ww = arguments["weights"].detach().requires_grad_(), wide["weights"].requires_grad_()
    rows, wrows = op.permute(x, assignment), wx[tokens]
    assert_close(rows.detach(), wrows.detach(), dtype=x.dtype, slack=0.2, label=f"{label}: rows")
    seed = ((torch.arange(wrows.numel(), device=x.device) % 11 - 5) / 4).view_as(wrows).double()
    _compare_grads((rows, wrows), ((x,), (wx,)), (seed, seed), f"{label}: permute", names=("x",))
    for name, w, exact_w in (("unweighted", None, None), ("weighted", weights, ww)):
        source = rows.detach().requires_grad_()
        wsource = source.detach().double().requires_grad_()
        y = op.unpermute(source, w, assignment)
        values = wsource if exact_w is None else wsource * exact_w[tokens, slots].unsqueeze(1)
        wy = torch.zeros_like(wx).index_add(0, tokens, values)
        assert_close(
            y.detach(), wy.detach(), dtype=x.dtype, floor=1.0, label=f"{label}: {name} sum"
        )
        grad = ((torch.arange(wy.numel(), device=x.device) % 7 - 3) / 4).view_as(wy).double()
        inputs = ((source,), (wsource,)) if w is None else ((source, w), (wsource, exact_w))
        _compare_grads(
            (y, wy), inputs, (grad, grad), f"{label}: {name} unpermute", names=("rows", "weights")
        )


def _compare_grads(
    outputs: tuple[Tensor, Tensor],
    inputs: tuple[tuple[Any, ...], tuple[Any, ...]],
    seeds: tuple[Tensor, Tensor],
    label: str,
    names: tuple[str, ...],
) -> None:
    """Gradients of the operator's output and of the formula's, by input."""
    given = seeds[0].to(outputs[0].dtype)
    found = torch.autograd.grad(outputs[0], inputs[0], given, materialize_grads=True)
    wanted = torch.autograd.grad(outputs[1], inputs[1], seeds[1], materialize_grads=True)
    for name, one, other, like in zip(names, found, wanted, inputs[0], strict=False):
        assert_close(one, other, dtype=like.dtype, slack=4.0, floor=1.0, label=f"{label}: d{name}")


def compare_grouped_products(
    op: Any, arguments: dict[str, Any], wide: dict[str, Any], label: str
) -> None:
    """The products called alone, and the weight gradient added to buffers that hold something."""
    x, weight, counts = (arguments[name] for name in ("x", "weight", "counts"))
    numbers = counts.tolist() if isinstance(counts, Tensor) else counts
    expert = torch.repeat_interleave(
        torch.arange(len(numbers), device=x.device), torch.tensor(numbers, device=x.device)
    )
    dy = (torch.arange(x.shape[0] * weight.shape[1], device=x.device) % 13 - 6).to(x.dtype)
    dy = dy.view(x.shape[0], weight.shape[1])
    of_row = wide["weight"][expert]
    rest = {"dtype": x.dtype, "slack": 4.0, "floor": 1.0}
    y = torch.einsum("ri,roi->ro", wide["x"], of_row)
    assert_close(op.forward(x, weight, counts), y, **rest, label=f"{label}: forward")
    dx = torch.einsum("ro,roi->ri", dy.double(), of_row)
    assert_close(op.input_grad(dy, weight, counts), dx, **rest, label=f"{label}: input_grad")
    product = torch.einsum("ro,ri->roi", dy.double(), wide["x"])
    product = torch.zeros_like(wide["weight"]).index_add(0, expert, product)
    for wanted in (torch.float32, torch.float64):
        buffer = torch.full(weight.shape, 0.5, dtype=wanted, device=x.device)
        op.weight_grad(dy, x, counts, buffer)
        assert_close(
            buffer, product + 0.5, dtype=wanted, slack=8.0, floor=8.0,
            label=f"{label}: weight_grad into {wanted}",
        )  # fmt: skip
