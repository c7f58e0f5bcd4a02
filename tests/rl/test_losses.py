"""The clipped loss: values, gradients, and sums that do not care how a batch is cut."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcore_rl import GRPOLoss, PolicyCounts, PolicyLossInput


def inputs(
    ratios: list[float],
    advantages: list[float],
    mask: list[int] | None = None,
    reference: list[float] | None = None,
) -> PolicyLossInput:
    """Tokens of one sequence whose behaviour probability is a half."""
    size = len(ratios)
    own = torch.tensor([1.0] * size if mask is None else mask, dtype=torch.float32)
    behaviour = torch.full((size,), math.log(0.5))
    return PolicyLossInput(
        log_probs=(behaviour + torch.tensor(ratios).log()).requires_grad_(),
        behaviour=behaviour,
        advantages=torch.tensor(advantages),
        mask=own,
        lengths=own.sum().expand(size),
        reference=None if reference is None else behaviour + torch.tensor(reference).log(),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "cost", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.1, 1.0, -1.1, -1.1, False),
        (1.4, 1.0, -1.3, 0.0, True),  # risen far enough
        (1.4, -1.0, 1.4, 1.4, False),  # must come down: no limit
        (0.7, 1.0, -0.7, -0.7, False),  # must go up: no limit
        (0.7, -1.0, 0.9, 0.0, True),  # fallen far enough
        (0.95, -2.0, 1.9, 1.9, False),
        (1.4, 0.0, 0.0, 0.0, False),
    ],
)
def test_one_token(
    ratio: float, advantage: float, cost: float, gradient: float, clipped: bool
) -> None:
    """Clipped at 0.9 and 1.3; d cost / d ln π is −r·A where the gradient goes on."""
    one = inputs([ratio], [advantage])
    output = GRPOLoss(clip_low=0.1, clip_high=0.3)(one)
    output.total.backward()
    assert output.total.item() == pytest.approx(cost, abs=1e-6)
    assert one.log_probs.grad is not None
    assert one.log_probs.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert output.sums["clip_fraction"].item() == clipped
    assert output.sums["kl"].item() == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-6)


def test_distance_to_the_reference() -> None:
    """k3: ρ − ln ρ − 1 with ρ = reference / π, and its gradient 1 − ρ."""
    both = inputs([1.0, 0.8], [0.0, 0.0], reference=[1.0, 1.6])
    loss = GRPOLoss(kl_coefficient=0.5)
    output = loss(both)
    output.total.backward()
    rho = 2.0
    assert output.sums["kl_reference"].item() == pytest.approx(rho - math.log(rho) - 1, abs=1e-6)
    assert output.total.item() == pytest.approx(0.5 * (rho - math.log(rho) - 1), abs=1e-6)
    assert both.log_probs.grad is not None
    torch.testing.assert_close(both.log_probs.grad, torch.tensor([0.0, 0.5 * (1 - rho)]))
    assert loss.metrics == ("clip_fraction", "kl", "kl_reference")
    assert GRPOLoss().metrics == ("clip_fraction", "kl")
    assert not GRPOLoss().needs_reference


def test_no_distance_is_exactly_zero() -> None:
    same = inputs([1.0] * 3, [0.0] * 3, reference=[1.0] * 3)
    output = GRPOLoss(kl_coefficient=1.0)(same)
    assert output.total.item() == 0
    assert output.sums["kl"].item() == output.sums["kl_reference"].item() == 0


@pytest.mark.parametrize("junk", [math.inf, -math.inf, math.nan])
def test_what_prompts_hold_is_not_read(junk: float) -> None:
    clean = inputs([1.1, 0.9], [1.0, -1.0], reference=[1.2, 1.3])
    loss = GRPOLoss(kl_coefficient=0.1)
    expected = loss(clean)
    expected.total.backward()
    filthy = inputs([2.0, 1.1, 0.9], [1.0, 1.0, -1.0], mask=[0, 1, 1], reference=[1.0, 1.2, 1.3])
    tensors = {}
    for name in ("log_probs", "behaviour", "advantages", "reference"):
        value = getattr(filthy, name).detach().clone()
        value[0] = junk
        tensors[name] = value
    tensors["log_probs"].requires_grad_()
    filthy = replace(filthy, **tensors)
    output = loss(filthy)
    output.total.backward()
    assert output.total.item() == expected.total.item()
    assert filthy.log_probs.grad is not None
    assert clean.log_probs.grad is not None
    assert filthy.log_probs.grad.tolist() == [0.0, *clean.log_probs.grad.tolist()]
    for name, value in expected.sums.items():
        assert output.sums[name].item() == value.item()


def batch_of(lengths: list[int], seed: int) -> list[PolicyLossInput]:
    """One input per sequence, each with a prompt of two tokens."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for length in lengths:
        size = length + 2
        values = torch.randn(4, size, generator=generator, dtype=torch.float64)
        sequences.append(
            PolicyLossInput(
                log_probs=values[0],
                behaviour=values[0] + 0.3 * values[1],
                advantages=values[2][:1].expand(size),
                mask=torch.tensor([0.0, 0.0] + [1.0] * length, dtype=torch.float64),
                lengths=torch.full((size,), float(length), dtype=torch.float64),
                reference=values[0] + 0.3 * values[3],
            )
        )
    return sequences


def joined(parts: list[PolicyLossInput]) -> PolicyLossInput:
    def cat(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    names = ("log_probs", "behaviour", "advantages", "mask", "lengths", "reference")
    return PolicyLossInput(**{name: cat(name) for name in names})


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=6),
    st.sampled_from(["token", "sequence", "constant"]),
    st.integers(1, 3),
    st.integers(0, 10**6),
)
def test_every_aggregation_is_free_of_how_the_batch_is_cut(
    lengths: list[int], aggregation: Any, micro: int, seed: int
) -> None:
    """U26: the parts' totals over the global counts add up to the definition, gradient included."""
    loss = GRPOLoss(aggregation=aggregation, kl_coefficient=0.1)
    counts = PolicyCounts(tokens=sum(lengths), sequences=len(lengths), max_tokens=7)
    sequences = batch_of(lengths, seed)

    def result(size: int) -> tuple[float, list[Tensor]]:
        total, leaves = torch.zeros((), dtype=torch.float64), []
        for start in range(0, len(sequences), size):
            leaf = joined(sequences[start : start + size])
            leaf = replace(leaf, log_probs=leaf.log_probs.clone().requires_grad_())
            total = total + loss(leaf).total / loss.denominator(counts)
            leaves.append(leaf.log_probs)
        total.backward()
        return total.item(), [leaf.grad for leaf in leaves if leaf.grad is not None]

    whole, gradient = result(len(sequences))
    parts, gradients = result(micro)
    assert parts == pytest.approx(whole, rel=1e-12)
    torch.testing.assert_close(torch.cat(gradients), torch.cat(gradient))
    per_sequence = [loss_of(sequence) for sequence in sequences]
    expected = {
        "token": sum(map(sum, per_sequence)) / sum(lengths),
        "sequence": sum(sum(x) / len(x) for x in per_sequence) / len(lengths),
        "constant": sum(map(sum, per_sequence)) / (7 * len(lengths)),
    }[aggregation]
    assert whole == pytest.approx(expected, rel=1e-9, abs=1e-12)


def loss_of(sequence: PolicyLossInput) -> list[float]:
    """The cost of each own token, written out from the definition."""
    costs = []
    assert sequence.reference is not None
    for i in range(2, len(sequence.mask)):
        r = math.exp(sequence.log_probs[i] - sequence.behaviour[i])
        a = sequence.advantages[i].item()
        rho = math.exp(sequence.reference[i] - sequence.log_probs[i])
        clipped = min(max(r, 0.8), 1.2)
        costs.append(-min(r * a, clipped * a) + 0.1 * (rho - math.log(rho) - 1))
    return costs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_low": 0.0}, r"clip_low=0\.0 must lie in 0 < clip_low <= 1"),
        ({"clip_low": 1.5}, r"clip_low=1\.5"),
        ({"clip_high": -0.1}, r"clip_high=-0\.1 must be greater than 0"),
        ({"kl_coefficient": -1.0}, r"kl_coefficient=-1\.0 must be at least 0"),
        ({"aggregation": "mean"}, "aggregation='mean' is none of token, sequence, constant"),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOLoss(**fields)
