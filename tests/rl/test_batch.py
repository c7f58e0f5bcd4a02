"""Rollouts as packed micro-batches."""

import torch

from mcore_rl import Episode, Rollout, micro_batches, policy_batch


def rollout(prompt: list[int], action: list[int], more: list[int] | None = None) -> Rollout:
    """An observation and an action, and perhaps another observation and the same action."""
    tokens = [*prompt, *action] + ([*more, *action] if more else [])
    own = [False] * len(prompt) + [True] * len(action)
    own += [False] * len(more) + [True] * len(action) if more else []
    episode = Episode(environment="e", seed=0, observations=(), actions=(), rewards=(), info=())
    return Rollout(
        task=0,
        sample=0,
        tokens=tuple(tokens),
        own=tuple(own),
        logprobs=tuple(
            -0.5 * token if mine else 0.0 for token, mine in zip(tokens, own, strict=True)
        ),
        episode=episode,
        weights_version=0,
    )


def test_every_place_is_about_the_next_token() -> None:
    batch = policy_batch([rollout([1, 2], [3, 4]), rollout([5], [6], [7])], [1.5, -2.0])
    assert batch.tokens.tolist() == [1, 2, 3, 5, 6, 7]
    assert batch.labels is not None
    assert batch.loss_mask is not None
    assert batch.labels.tolist() == [2, 3, 4, 6, 7, 6]
    assert batch.loss_mask.tolist() == [0, 1, 1, 1, 0, 1]
    assert batch.behaviour.tolist() == [0, -1.5, -2, -3, 0, -3]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 3, 6]
    assert (batch.max_seqlen, batch.uniform) == (3, (2, 3))
    assert batch.advantages.tolist() == [1.5] * 3 + [-2.0] * 3
    assert batch.own_lengths.tolist() == [2] * 6
    assert batch.reference is None


def test_padding_is_a_document_that_counts_for_nothing() -> None:
    plain = policy_batch([rollout([1, 2], [3, 4]), rollout([5], [6])], [1.0, 2.0])
    assert plain.uniform is None
    padded = policy_batch([rollout([1, 2], [3, 4]), rollout([5], [6])], [1.0, 2.0], multiple_of=8)
    assert padded.num_tokens == 8
    assert padded.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert padded.max_seqlen == 4
    assert padded.loss_mask is not None
    assert padded.loss_mask[4:].tolist() == [0] * 4
    for name in ("tokens", "labels", "loss_mask", "behaviour", "advantages", "own_lengths"):
        assert getattr(padded, name)[:4].equal(getattr(plain, name))
    same = policy_batch([rollout([1, 2], [3])], [0.0], multiple_of=2)
    assert (same.num_tokens, same.uniform) == (2, (1, 2))


def test_micro_batches_keep_the_order() -> None:
    rollouts = [rollout([i], [i + 1] * (1 + i % 3)) for i in range(7)]
    advantages = [float(i) for i in range(7)]
    parts = micro_batches(rollouts, advantages, 3)
    assert [len(part.cu_seqlens) - 1 for part in parts] == [3, 3, 1]
    whole = policy_batch(rollouts, advantages)
    for name in ("tokens", "labels", "loss_mask", "behaviour", "advantages", "own_lengths"):
        assert torch.cat([getattr(part, name) for part in parts]).equal(getattr(whole, name))
