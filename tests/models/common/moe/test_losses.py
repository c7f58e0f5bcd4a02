"""Losses of routers and what steps teach them, against their formulas."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_models.common.moe import adapt_routers, expert_loads
from mcore_parallel import ParallelMesh

sys.path.append(str(Path(__file__).parent))
from moe_layers import E, H, K, batch_of, changed, context_of, make, random

BOUNDS = [0, 5, 12]


def some_mask() -> Tensor:
    mask = torch.ones(12, dtype=torch.float64)
    mask[[2, 3, 9]] = 0
    return mask


def plain_balance(scores: Tensor, chosen: Tensor, mask: Tensor, load: Tensor | None) -> Tensor:
    """Valid tokens · E · Σ_e f_e P_e of some tokens, by its definition."""
    shares = scores / scores.sum(-1, keepdim=True)
    f = (chosen * mask[:, None]).sum(0) / (K * mask.sum()) if load is None else load
    p = (shares * mask[:, None]).sum(0) / mask.sum()
    return mask.sum() * E * (f * p).sum()


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrt_softplus"])
def test_several_losses_at_once(function: str) -> None:
    """Of documents, of the micro-batch, global and of the logits; values and gradients."""
    scopes = ("sequence", "micro_batch", "global")
    config = changed(
        score_function=function,
        aux_loss_scope=scopes,
        aux_loss_coefficient=(0.1, 0.2, 0.3),
        z_loss_coefficient=0.4,
    )
    layer, hidden, mask = make(config), random(12, H), some_mask()
    context = context_of(config, batch_of(mask, BOUNDS), 9.0)
    (layer(hidden, context) * 0.0).sum().backward()
    logits = hidden @ layer.router.weight.t()
    scores = {
        "softmax": logits.softmax(-1),
        "sigmoid": 1 / (1 + (-logits).exp()),
        "sqrt_softplus": (1 + logits.exp()).log().sqrt(),
    }[function]
    chosen = torch.zeros_like(logits).scatter(1, logits.topk(K).indices, 1.0)
    assert layer.router.load is not None
    want = {
        "moe_balance_loss_sequence": 0.1 * sum(
            plain_balance(scores[rows], chosen[rows], mask[rows], None)
            for rows in (slice(0, 5), slice(5, 12))
        ),
        "moe_balance_loss_micro_batch": 0.2 * plain_balance(scores, chosen, mask, None),
        "moe_balance_loss_global": 0.3 * plain_balance(scores, chosen, mask, layer.router.load),
        "moe_z_loss": 0.4 * (logits.exp().sum(-1).log().square() * mask).sum(),
    }  # fmt: skip
    assert context.auxiliary is not None
    found = context.auxiliary.shares()
    assert list(found) == list(want)
    for name, value in want.items():
        assert float(found[name]) == pytest.approx(value.item() / 9, rel=1e-12), name
    (gradient,) = torch.autograd.grad(sum(want.values()) / 9, layer.router.weight)  # type: ignore[arg-type]
    assert layer.router.weight.grad is not None
    torch.testing.assert_close(layer.router.weight.grad, gradient)


def test_a_global_balance_begins_with_equal_shares() -> None:
    """Which give no gradient; from then on the shares of the batch before count."""
    config = changed(aux_loss_scope="global", aux_loss_coefficient=1.0)
    layer = make(config)
    hidden = random(12, H) + 2 * layer.router.weight[0].detach()  # expert 0 is liked best
    assert layer.router.load is not None
    with torch.no_grad():
        layer.router.load.zero_()
    values = []
    for _ in range(2):
        layer.zero_grad()
        context = context_of(config, batch_of(torch.ones(12), BOUNDS), 12.0)
        (layer(hidden, context) * 0.0).sum().backward()
        assert context.auxiliary is not None
        values.append(float(context.auxiliary.shares()["moe_balance_loss"]))
        gradient = layer.router.weight.grad
        assert gradient is not None
        if len(values) == 1:
            assert gradient.abs().max() < 1e-15
        adapt_routers(layer, expert_loads(layer, context.auxiliary, ParallelMesh.single()))
    assert values[0] == pytest.approx(1.0)
    assert values[1] > 1.05
    assert gradient.abs().max() > 1e-3
    chosen = torch.zeros(12, E).scatter(1, layer.router(hidden).experts, 1.0)
    torch.testing.assert_close(layer.router.load, chosen.sum(0).double() / 24)


def test_corrections_follow_the_counts_of_valid_tokens() -> None:
    """Up by the rate where fewer chose an expert than the mean, down where more; 0 stops it."""
    config = changed(score_function="sigmoid", correction_rate=0.01)
    layer, hidden, mask = make(config), random(12, H), some_mask()
    correction = layer.router.correction
    assert correction is not None
    assert not correction.requires_grad
    before = correction.clone()
    context = context_of(config, batch_of(mask, BOUNDS), 9.0)
    for _ in range(2):  # two micro-batches
        layer(hidden, context).sum().backward()
    assert context.auxiliary is not None
    loads = expert_loads(layer, context.auxiliary, ParallelMesh.single())
    ranking = (hidden @ layer.router.weight.t()).sigmoid() + before
    chosen = torch.zeros(12, E, dtype=torch.float64).scatter(1, ranking.topk(K).indices, 1.0)
    counts = 2 * (chosen * mask[:, None]).sum(0)
    assert torch.equal(loads.by_layer[0], counts)
    name = "moe_imbalance_0"
    want = float(counts.max() / counts.mean())
    assert loads.imbalance(ParallelMesh.single(), [0, 3]) == {name: want, "moe_imbalance_3": 0.0}
    adapt_routers(layer, loads)
    torch.testing.assert_close(correction - before, 0.01 * (counts.mean() - counts).sign())
    layer.router.moe = changed(correction_rate=0.0).moe  # type: ignore[assignment]
    kept = correction.clone()
    adapt_routers(layer, loads)
    assert torch.equal(correction, kept)


def test_corrections_even_out_what_experts_get() -> None:
    config = changed(score_function="sigmoid", correction_rate=0.02, aux_loss_coefficient=0.0)
    layer, hidden = make(config), random(64, H)
    imbalance = []
    for _ in range(60):
        context = context_of(config, batch_of(torch.ones(64), [0, 64]), 64.0)
        layer(hidden, context).sum().backward()
        assert context.auxiliary is not None
        loads = expert_loads(layer, context.auxiliary, ParallelMesh.single())
        imbalance += loads.imbalance(ParallelMesh.single(), [0]).values()
        adapt_routers(layer, loads)
    assert imbalance[0] > 1.15
    assert imbalance[-1] < 1.1


def test_choices_are_not_counted_without_a_backward_pass_or_outside_of_training() -> None:
    layer, config = make(changed()), changed()
    context = context_of(config, batch_of(torch.ones(12), BOUNDS), 12.0)
    layer(random(12, H), context)
    assert context.auxiliary is not None
    assert not context.auxiliary.choices
    assert not expert_loads(layer, context.auxiliary, ParallelMesh.single()).by_layer[0].any()
