"""Sums of whole numbers: single-turn, checkable, as easy or hard as wanted."""

from __future__ import annotations

import random
import re

from mcore_rl.environments.base import StepResult

_NUMBER = re.compile(r"[-+]?\d+")


class ChainSum:
    """Asks for the value of `a + b - c …`; reward 1 for the right last number, else 0."""

    name = "chain_sum"

    def __init__(self, *, terms: int = 2, digits: int = 1) -> None:
        for label, value in (("terms", terms), ("digits", digits)):
            if value < 1:
                raise ValueError(f"chain_sum: {label}={value} must be at least 1")
        self.terms = terms
        self.digits = digits
        self._answer: int | None = None

    def reset(self, seed: int) -> str:
        """Return the question of task `seed`."""
        rng = random.Random(f"{self.name} {self.terms} {self.digits} {seed}")
        low = 10 ** (self.digits - 1) if self.digits > 1 else 0
        values = [rng.randint(low, 10**self.digits - 1) for _ in range(self.terms)]
        text, total = str(values[0]), values[0]
        for value in values[1:]:
            sign = rng.choice((1, -1))
            text += f" {'+' if sign > 0 else '-'} {value}"
            total += sign * value
        self._answer = total
        return f"{text} ="

    def step(self, action: str) -> StepResult:
        """Score the last whole number in `action`; the episode is over."""
        if self._answer is None:
            raise RuntimeError("chain_sum: no episode in progress: call reset(seed) first")
        numbers = _NUMBER.findall(action)
        given = int(numbers[-1]) if numbers else None
        answer, self._answer = self._answer, None
        return StepResult(
            observation="",
            reward=float(given == answer),
            done=True,
            info={"answer": answer, "given": given},
        )
