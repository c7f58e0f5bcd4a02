"""What experts take at most: against a plain count, and whatever padding there is."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_models import TokenBatch, TokenContext
from mcore_models.common import MoE

sys.path.append(str(Path(__file__).parent))
from moe_layers import CONFIG, E, H, batch_of, changed, make, plain_expert, random


def kept_choices(layer: MoE, hidden: Tensor, batch: TokenBatch) -> list[list[int]]:
    """The experts that each token keeps, one expert after another."""
    moe = layer.config
    routing = layer.router(hidden)
    scores, experts = routing.scores.tolist(), routing.experts.tolist()
    documents = [0] * len(hidden)
    if moe.capacity_scope == "sequence":
        documents = batch.documents().tolist()
    assert batch.loss_mask is not None
    valid = (batch.loss_mask > 0).tolist()
    kept: list[list[int]] = [[] for _ in experts]
    for document in set(documents):
        mine = [t for t in range(len(hidden)) if documents[t] == document]
        count = sum(valid[t] for t in mine)
        capacity = math.ceil(moe.capacity_factor * count * moe.top_k / moe.num_experts)  # type: ignore[operator]
        for expert in range(moe.num_experts):
            asking = [t for t in mine if expert in experts[t]]
            if moe.drop_policy == "probability":
                asking.sort(key=lambda t: -scores[t][expert])
            asking.sort(key=lambda t: not valid[t])
            for t in asking[:capacity]:
                kept[t].append(expert)
    return kept


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("policy", ["probability", "position"])
@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
@pytest.mark.parametrize("factor", [0.5, 0.8, 1.3])
def test_the_first_or_the_best_are_kept(factor: float, scope: str, policy: str, pad: bool) -> None:
    config = changed(
        capacity_factor=factor, capacity_scope=scope, drop_policy=policy, pad_to_capacity=pad
    )
    layer = make(config)
    hidden, mask = random(19, H), torch.ones(19)
    mask[[1, 2, 9, 10, 11, 12, 18]] = 0
    batch = batch_of(mask, [0, 9, 13, 19])  # one of them has no valid token
    out = layer(hidden, TokenContext(batch=batch))
    routing, kept = layer.router(hidden), kept_choices(layer, hidden, batch)
    total = sum(map(len, kept))
    assert 0 < total < 19 * 2
    for token in range(19):
        want = torch.zeros(H, dtype=torch.float64)
        for expert, weight in zip(
            routing.experts[token].tolist(), routing.weights[token], strict=True
        ):
            if expert in kept[token]:
                want += weight * plain_expert(layer, expert, hidden[token])
        torch.testing.assert_close(out[token], want)


def all_to_the_first(pad: bool, tokens: int = 8) -> tuple[MoE, Tensor]:
    config = changed(
        num_experts=2,
        top_k=1,
        normalise_top_k=False,
        capacity_factor=1.0,
        pad_to_capacity=pad,
    )
    layer, hidden = make(config), random(tokens, H)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[0, 0] = 1.0
        hidden[:, 0] = torch.tensor([3.0, 1.0, 2.5, 0.5, 4.0, 0.7, 1.5, 0.2])[:tokens]
    return layer, hidden


@pytest.mark.parametrize("pad", [False, True])
def test_the_default_policy_keeps_the_most_probable(pad: bool) -> None:
    """U38: eight tokens want expert 0 of two: four with the highest probability, others get 0."""
    layer, hidden = all_to_the_first(pad)
    out = layer(hidden, TokenContext(batch=batch_of(torch.ones(8), [0, 8])))
    assert [t for t in range(8) if out[t].any()] == [0, 2, 4, 6]
    for token in (0, 2, 4, 6):
        score = torch.softmax(layer.router.weight @ hidden[token], 0)[0]
        torch.testing.assert_close(out[token], score * plain_expert(layer, 0, hidden[token]))
    out.square().sum().backward()
    down = layer.experts.down.weight.grad
    assert down is not None
    assert down[0].any()
    assert not down[1].any()


def test_tokens_outside_of_the_loss_take_what_room_is_left() -> None:
    """U37's kind: padding with the best scores displaces nobody, and makes no room either."""
    layer, hidden = all_to_the_first(False)
    mask = torch.tensor([0.0, 1, 1, 1, 0, 1, 0, 0])
    out = layer(hidden, TokenContext(batch=batch_of(mask, [0, 8])))
    assert [t for t in range(8) if out[t].any()] == [1, 2]  # room for ceil(4 / 2), of 4 tokens
    mask = torch.tensor([0.0, 1, 0, 0, 0, 0, 0, 0])
    out = layer(hidden, TokenContext(batch=batch_of(mask, [0, 8])))
    assert [t for t in range(8) if out[t].any()] == [1]
    half = layer(hidden[:4], TokenContext(batch=batch_of(torch.ones(4), [0, 4])))
    padded = layer(hidden, TokenContext(batch=batch_of(torch.tensor([1.0] * 4 + [0] * 4), [0, 8])))
    torch.testing.assert_close(padded[:4], half)
    assert not padded[4:].any()


def test_nothing_is_dropped_outside_of_training_or_with_room_for_all() -> None:
    free, hidden = make(CONFIG), random(9, H)
    batch = batch_of(torch.ones(9), [0, 4, 9])
    want = free(hidden, TokenContext(batch=batch))
    tight = make(changed(capacity_factor=0.5))
    assert not torch.equal(tight(hidden, TokenContext(batch=batch)), want)
    assert torch.equal(tight.eval()(hidden, TokenContext(batch=batch)), want)
    for scope in ("sequence", "micro_batch"):
        wide = make(changed(capacity_factor=float(E), capacity_scope=scope))
        assert torch.equal(wide(hidden, TokenContext(batch=batch)), want)


def test_a_batch_of_nothing() -> None:
    layer = make(changed(capacity_factor=1.0, pad_to_capacity=True))
    out = layer(random(0, H), TokenContext(batch=batch_of(torch.ones(0), [0])))
    assert out.shape == (0, H)


def test_padded_experts_all_get_the_same_number_of_rows() -> None:
    layer, hidden = all_to_the_first(True)
    seen: list[tuple[int, ...]] = []
    layer.experts.register_forward_hook(lambda module, args, out: seen.append(args[1]))
    layer(hidden, TokenContext(batch=batch_of(torch.ones(8), [0, 8])))
    layer(hidden, TokenContext(batch=batch_of(torch.ones(8), [0, 3, 8])))
    assert seen == [(4, 4), (5, 5)]
