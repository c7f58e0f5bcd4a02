"""Loss scaling: fp16 gradients are kept out of the numbers that fp16 does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_train.checks import require


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """By what the loss is multiplied in fp16 training before gradients are taken.

    The scale starts at `initial`, is multiplied by `growth` after `interval` steps in a row with
    finite gradients, and by `backoff` when `patience` steps had others (each of which changes no
    weight), but never falls below `least`. `growth: 1` and `backoff: 1` keep it as it is.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 1000
    patience: int = 1
    least: float = 1.0

    def __post_init__(self) -> None:
        require(self.least > 0, f"least={self.least} must be greater than 0")
        require(
            self.least <= self.initial < float("inf"),
            f"initial={self.initial} must be finite and at least least={self.least}",
        )
        require(
            1 <= self.growth < float("inf"), f"growth={self.growth} must be finite and at least 1"
        )
        require(0 < self.backoff <= 1, f"backoff={self.backoff} must lie in 0 < backoff <= 1")
        for name in ("interval", "patience"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")


class LossScaler:
    """The scale of this moment, the same on every rank, and what it goes by.

    (Micikevicius et al., Mixed Precision Training, 2018.) `good` counts the steps with finite
    gradients since the scale was changed, `bad` those with others since the last change or since
    `good` was full.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self.config = config
        self.scale = config.initial
        self.good = 0
        self.bad = 0

    @property
    def is_least(self) -> bool:
        """Whether gradients that are not finite cannot be mended by another scale."""
        return self.scale <= self.config.least or self.config.backoff == 1

    def update(self, *, finite: bool) -> None:
        """Take note of the gradients of a step, which every rank found to be finite or not."""
        if finite:
            self.good += 1
            if self.good >= self.config.interval:  # more: of a run whose interval was longer
                self.scale *= self.config.growth
                self.good = self.bad = 0
            return
        self.good = 0
        self.bad += 1
        if self.bad >= self.config.patience:
            self.scale = max(self.scale * self.config.backoff, self.config.least)
            self.bad = 0

    def state_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {"scale": self.scale, "good": self.good, "bad": self.bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.scale = float(state["scale"])
        self.good, self.bad = int(state["good"]), int(state["bad"])
