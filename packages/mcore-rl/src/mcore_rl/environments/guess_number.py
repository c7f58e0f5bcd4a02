"""Guess a hidden number from "higher" and "lower": multi-turn."""

from __future__ import annotations

import random
import re

from mcore_rl.environments.base import StepResult

_NUMBER = re.compile(r"\d+")


class GuessNumber:
    """Hides a number from 1 to `high`; reward 1 when it is named within `turns` guesses."""

    name = "guess_number"

    def __init__(self, *, high: int = 15, turns: int = 4) -> None:
        for label, value in (("high", high), ("turns", turns)):
            if value < 1:
                raise ValueError(f"guess_number: {label}={value} must be at least 1")
        self.high = high
        self.turns = turns
        self._hidden = 0
        self._left = 0

    def reset(self, seed: int) -> str:
        """Hide the number of task `seed` and return the question."""
        self._hidden = random.Random(f"{self.name} {self.high} {seed}").randint(1, self.high)
        self._left = self.turns
        return f"I think of a number from 1 to {self.high}. You have {self.turns} guesses."

    def step(self, action: str) -> StepResult:
        """Answer one guess; an action without a number costs a guess."""
        if not self._left:
            raise RuntimeError("guess_number: no episode in progress: call reset(seed) first")
        self._left -= 1
        found = _NUMBER.search(action)
        guess = int(found.group()) if found else None
        right = guess == self._hidden
        if right or not self._left:
            self._left = 0
            return StepResult(
                observation="", reward=float(right), done=True, info={"hidden": self._hidden}
            )
        if guess is None:
            hint = "Name a number."
        else:
            hint = "Higher." if guess < self._hidden else "Lower."
        return StepResult(observation=hint, reward=0.0, done=False, info={"guess": guess})
