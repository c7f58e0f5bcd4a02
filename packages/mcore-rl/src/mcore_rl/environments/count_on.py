"""Counting on from a number: single-turn, within reach of a small model that knows nothing."""

from __future__ import annotations

import random

from mcore_rl.environments.base import StepResult


class CountOn:
    """Shows a number and asks for the digits that follow its last one, as in `4821` → `23`.

    Numbers are written in base `base`, so that after the highest digit comes 0. The reward is the
    share of the `count` digits that stand right at their place; what follows them is not read. So a
    policy that hits single digits by chance has something to go by, and one that has understood
    earns 1. There are base^digits tasks.
    """

    name = "count_on"

    def __init__(self, *, digits: int = 6, count: int = 2, base: int = 10) -> None:
        for label, value in (("digits", digits), ("count", count)):
            if value < 1:
                raise ValueError(f"count_on: {label}={value} must be at least 1")
        if not 2 <= base <= 10:
            raise ValueError(f"count_on: base={base} must lie in 2 <= base <= 10")
        self.digits = digits
        self.count = count
        self.base = base
        self._answer: str | None = None

    def reset(self, seed: int) -> str:
        """Return the number of task `seed`."""
        rng = random.Random(f"{self.name} {self.digits} {self.base} {seed}")
        number = [rng.randrange(self.base) for _ in range(self.digits)]
        following = range(number[-1] + 1, number[-1] + 1 + self.count)
        self._answer = "".join(str(digit % self.base) for digit in following)
        return "".join(map(str, number))

    def step(self, action: str) -> StepResult:
        """Score the first digits of `action`; the episode is over."""
        if self._answer is None:
            raise RuntimeError("count_on: no episode in progress: call reset(seed) first")
        answer, self._answer = self._answer, None
        right = sum(a == b for a, b in zip(action, answer, strict=False))
        return StepResult(
            observation="",
            reward=right / self.count,
            done=True,
            info={"answer": answer, "given": action[: self.count]},
        )
