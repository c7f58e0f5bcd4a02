"""Routing, capacity and the grouped linear operator beyond what conformance compares."""

from typing import Any

import pytest
import torch

from mcore_kernels import (
    Assignment,
    Kernels,
    RoutingRule,
    Target,
    jitter,
    limit_capacity,
    resolve,
    sinkhorn,
)
from mcore_kernels.ops.grouped_linear.native import NativeGroupedLinear
from mcore_parallel.expert import grouped_linear

kernels = Kernels()


def test_equal_scores_go_to_the_lowest_numbers() -> None:
    logits = torch.zeros(3, 64)
    logits[1, 40:] = 1.0
    logits[2, [7, 50]] = torch.tensor([2.0, 2.0])
    _, experts, _ = kernels.moe_route(logits, rule=RoutingRule(top_k=3))
    assert experts.tolist() == [[0, 1, 2], [40, 41, 42], [7, 50, 0]]
    saturated = torch.full((1, 8), 200.0) + torch.arange(8)  # σ is 1 for all of them
    _, experts, _ = kernels.moe_route(saturated, rule=RoutingRule(top_k=2, score="sigmoid"))
    assert experts.tolist() == [[7, 6]]


def test_a_correction_moves_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    rule = RoutingRule(top_k=2, score="sigmoid", normalise=True, scale=2.5)
    correction = torch.tensor([-1.0, 0.0, 0.0, 1.0])
    weights, experts, scores = kernels.moe_route(logits, correction, rule=rule)
    assert experts.tolist() == [[3, 1]]
    chosen = logits[0, [3, 1]].sigmoid()
    torch.testing.assert_close(weights[0], chosen / chosen.sum() * 2.5)
    torch.testing.assert_close(scores, logits.sigmoid())


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    """Two good experts in one group beat the best one, which is alone in its group."""
    logits = torch.tensor([[5.0, -9.0, 3.0, 3.0, 0.0, 0.0, 1.0, 1.0]])
    groups = {"num_groups": 4, "top_groups": 1, "top_k": 2, "score": "sqrt_softplus"}
    _, experts, _ = kernels.moe_route(logits, rule=RoutingRule(**groups))
    assert experts.tolist() == [[2, 3]]
    _, experts, _ = kernels.moe_route(logits, rule=RoutingRule(**groups, per_group=1))
    assert experts.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("options", "num_experts", "message"),
    [
        ({"top_k": 0}, 8, "top_k must be at least 1, got 0"),
        ({"top_k": 2, "score": "tanh"}, 8, "one of softmax, sigmoid, sqrt_softplus; got 'tanh'"),
        ({"top_k": 2, "num_groups": 2, "top_groups": 3}, 8, "and num_groups, got 3 of 2"),
        ({"top_k": 2, "num_groups": 3}, 8, "8 experts do not fall into 3 equal groups"),
        ({"top_k": 9}, 8, "top_k 9 of 8 experts that can be chosen"),
        ({"top_k": 5, "num_groups": 2}, 8, r"top_k 5 of 4 experts .*\(1 of 2 groups of 4\)"),
        ({"top_k": 2, "num_groups": 4, "per_group": 3}, 8, "per_group 3 is more than the 2"),
        ({"top_k": 2, "per_group": 0}, 8, "per_group must be at least 1, got 0"),
        ({"top_k": 2, "scale": float("nan")}, 8, "scale must be a finite number, got nan"),
    ],
)
def test_rules_that_cannot_be(options: dict[str, Any], num_experts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.moe_route(torch.zeros(1, num_experts), rule=RoutingRule(**options))


def test_sinkhorn_loads_experts_alike() -> None:
    logits = torch.randn(64, 8) + torch.linspace(0, 5, 8)
    plan = sinkhorn(logits, tolerance=1e-6)
    torch.testing.assert_close(plan.sum(0), torch.full((8,), 1 / 8), rtol=1e-3, atol=0)
    torch.testing.assert_close(plan.sum(1), torch.full((64,), 1 / 64), rtol=1e-3, atol=0)
    plain, even = (x.argmax(-1).bincount(minlength=8) for x in (logits, plan))
    assert plain.max() > 2 * even.max()
    assert sinkhorn(logits * 100, most=3).isfinite().all()
    assert sinkhorn(logits[:0]).shape == (0, 8)


def test_jitter_that_cannot_be() -> None:
    for epsilon in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=rf"epsilon must be in \[0, 1\), got {epsilon}"):
            jitter(torch.ones(3), epsilon)


def test_jitter_is_drawn_from_its_generator() -> None:
    x = torch.full((50, 4), 2.0, requires_grad=True)
    draws = [jitter(x, 0.1, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    least, most = draws[0].detach().aminmax()
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert 1.8 <= float(least) < 1.85
    assert 2.15 < float(most) <= 2.2
    (gradient,) = torch.autograd.grad(draws[0].sum(), x)
    torch.testing.assert_close(gradient * 2.0, draws[0].detach())


def test_capacity_keeps_the_most_probable() -> None:
    """U38: all tokens choose one of two experts, capacity 4: four kept, four contribute zero."""
    experts = torch.zeros(8, 1, dtype=torch.int64)
    weights = torch.tensor([0.1, 0.9, 0.3, 0.8, 0.8, 0.2, 0.8, 0.4]).unsqueeze(1)
    kept = limit_capacity(experts, weights, 2, capacity=4)
    assert kept.flatten().tolist() == [-1, 0, -1, 0, 0, -1, 0, -1]
    first = limit_capacity(experts, weights, 2, capacity=4, by="position")
    assert first.flatten().tolist() == [0, 0, 0, 0, -1, -1, -1, -1]
    x = torch.randn(8, 4, requires_grad=True)
    assignment = Assignment.of(kept, 2, has_dropped=True)
    assert assignment.counts.tolist() == [4, 0]
    rows = kernels.moe_permute.permute(x, assignment)
    out = kernels.moe_permute.unpermute(rows, weights, assignment)
    expected = torch.where(kept == 0, x * weights, 0.0)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.where(kept == 0, weights, 0.0).expand(8, 4))
    equal = limit_capacity(experts, torch.ones(8, 1), 2, capacity=3)
    assert equal.flatten().tolist() == [0, 0, 0, -1, -1, -1, -1, -1]
    assert limit_capacity(experts, weights, 2, capacity=0).max() == -1


def test_capacity_of_every_expert_over_many_copies() -> None:
    experts = torch.rand(40, 6).argsort(-1)[:, :2]
    weights = torch.rand(40, 2)
    kept = limit_capacity(limit_capacity(experts, weights, 6, 9), weights, 6, 7)
    assert torch.equal(kept, limit_capacity(experts, weights, 6, 7))
    for expert in range(6):
        mine = weights[experts == expert].sort(descending=True).values
        assert torch.equal(weights[kept == expert].sort(descending=True).values, mine[:7])
    with pytest.raises(ValueError, match="capacity must not be negative, got -1"):
        limit_capacity(experts, weights, 6, -1)
    with pytest.raises(ValueError, match="by is 'probability' or 'position', got 'age'"):
        limit_capacity(experts, weights, 6, 1, by="age")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_experts_is_their_sum(dtype: torch.dtype) -> None:
    """Route, permute, two products, weighted sum: against a loop over tokens."""
    x = torch.randn(9, 16).to(dtype).requires_grad_()
    up, down = (torch.randn(6, *shape).div(4).to(dtype) for shape in ((24, 16), (16, 12)))
    logits = torch.randn(9, 6)
    weights, experts, _ = kernels.moe_route(logits, rule=RoutingRule(top_k=2, normalise=True))
    assignment = Assignment.of(experts, 6)
    rows = kernels.moe_permute.permute(x, assignment)
    inner = kernels.swiglu(kernels.grouped_linear(rows, up, assignment.counts))
    outer = kernels.grouped_linear(inner, down, assignment.counts)
    out = kernels.moe_permute.unpermute(outer, weights, assignment)
    wide = x.detach().float()
    for t in range(9):
        wanted = torch.zeros(16)
        for weight, e in zip(weights[t], experts[t].tolist(), strict=True):
            gate, value = (up[e].float() @ wide[t]).chunk(2)
            wanted += weight * (down[e].float() @ (torch.nn.functional.silu(gate) * value))
        close = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(out[t].float(), wanted, **close)
    out.float().square().sum().backward()
    assert x.grad is not None


def test_weights_may_come_with_the_activation() -> None:
    """Before the last product or behind it: the same layer, with the same gradients."""
    generator = torch.Generator().manual_seed(3)
    x, up, down = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((7, 8), (4, 12, 8), (4, 8, 6))
    )
    experts = torch.rand(7, 4, generator=generator).argsort(-1)[:, :2]
    experts[2, 1] = -1
    assignment = Assignment.of(experts, 4, has_dropped=True)
    results = []
    for early in (True, False):
        weights = torch.linspace(0.1, 1, 14, dtype=torch.float64).view(7, 2).requires_grad_()
        rows = kernels.moe_permute.permute(x, assignment)
        inner = kernels.glu(
            kernels.grouped_linear(rows, up, assignment.counts),
            weights=assignment.row_weights(weights) if early else None,
        )
        outer = kernels.grouped_linear(inner, down, assignment.counts)
        out = kernels.moe_permute.unpermute(outer, None if early else weights, assignment)
        results.append((out, *torch.autograd.grad(out.square().sum(), weights)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert results[0][1][2, 1] == 0.0


def test_counts_that_do_not_fit() -> None:
    x, weight = torch.ones(3, 4), torch.ones(2, 5, 4)
    with pytest.raises(ValueError, match="3 counts for the weights of 2 experts"):
        kernels.grouped_linear(x, weight, (1, 1, 1))
    with pytest.raises(ValueError, match="counts add up to 2, there are 3 rows"):
        kernels.grouped_linear(x, weight, (1, 1))


def test_layers_of_mcore_parallel_take_it() -> None:
    x = torch.randn(7, 4, requires_grad=True)
    weight = torch.randn(3, 5, 4, requires_grad=True)
    counts = (3, 0, 4)
    y = grouped_linear(x, weight, None, counts, op=kernels.grouped_linear)
    own = kernels.grouped_linear(x, weight, counts)
    assert torch.equal(y, own)
    found = torch.autograd.grad(y.square().sum(), (x, weight))
    for one, other in zip(found, torch.autograd.grad(own.square().sum(), (x, weight)), strict=True):
        torch.testing.assert_close(one, other)


def test_torchs_grouped_product_is_used_as_it_wants_to_be() -> None:
    """The arguments of its kernel, which torch emulates on CPU; sizes it cannot take go round."""
    native, reference = (
        NativeGroupedLinear(),
        resolve("grouped_linear", target=Target(dtype=torch.bfloat16), require="reference"),
    )
    for out, size in ((24, 16), (24, 12)):
        x, weight = torch.randn(9, size).bfloat16(), torch.randn(4, out, size).bfloat16()
        dy, counts = torch.randn(9, out).bfloat16(), (3, 0, 5, 1)
        close = {"rtol": 0.02, "atol": 0.05}
        torch.testing.assert_close(
            native.forward(x, weight, counts), reference.forward(x, weight, counts), **close
        )
        torch.testing.assert_close(
            native.input_grad(dy, weight, counts), reference.input_grad(dy, weight, counts), **close
        )
        transposed = weight.transpose(1, 2).contiguous().transpose(1, 2)
        torch.testing.assert_close(
            native.forward(x, transposed, torch.tensor(counts)),
            reference.forward(x, weight, counts),
            **close,
        )
