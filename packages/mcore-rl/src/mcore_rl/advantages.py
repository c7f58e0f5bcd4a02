"""Advantages of rollouts within groups of the same task.

G groups, N rollouts of each group's task.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

AdvantageKind = Literal["grpo", "dr_grpo", "rloo"]


def group_advantages(rewards: Tensor, *, kind: AdvantageKind = "grpo", eps: float = 1e-6) -> Tensor:
    """Return how much better each rollout did than its group.

    Args:
        rewards: [G, N] total rewards; the N rollouts of a row share one task.
        kind: `grpo` (reward − group mean) / (group standard deviation + eps), Shao et al., 2024;
            `dr_grpo` reward − group mean, Liu et al., 2025;
            `rloo` reward − mean of the other N − 1, Ahmadian et al., 2024.
        eps: keeps a group of nearly equal rewards from blowing up. A group of equal rewards has
            advantages of exactly 0.

    Returns:
        [G, N] in the dtype of `rewards`; every row sums to 0.

    Raises:
        ValueError: rewards are not [G, N], not floating, not finite, or N is too small.
    """
    if rewards.dim() != 2 or not rewards.is_floating_point():
        raise ValueError(
            f"rewards must be floating [groups, rollouts], got {list(rewards.shape)} "
            f"{rewards.dtype}"
        )
    size = rewards.shape[1]
    if size < 2:
        raise ValueError(f"a group of {size} rollouts has nothing to compare with: use at least 2")
    if not bool(rewards.isfinite().all()):
        group, rollout = (~rewards.isfinite()).nonzero()[0].tolist()
        value = rewards[group, rollout].item()
        raise ValueError(f"the reward of rollout {rollout} in group {group} is {value}")
    centred = rewards - rewards.mean(1, keepdim=True)
    equal = (rewards == rewards[:, :1]).all(1, keepdim=True)
    centred = centred.masked_fill(equal, 0.0)
    if kind == "dr_grpo":
        return centred
    if kind == "rloo":
        return centred * (size / (size - 1))
    if kind == "grpo":
        return centred / (rewards.std(1, keepdim=True, correction=0) + eps)
    raise ValueError(f"kind={kind!r} is none of grpo, dr_grpo, rloo")
