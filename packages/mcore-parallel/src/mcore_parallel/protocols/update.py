"""Rules by which an optimizer changes one tensor."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["SGD", "OnePassRule", "UpdateRule"]


class UpdateRule(Protocol):
    """How an optimizer changes one tensor, given its gradient and its state.

    Tensors are float32 (or wider): whole parameters or flat slices of them, as the optimizer's
    partition says. A rule keeps nothing about a tensor outside `state`.
    """

    @property
    def state_names(self) -> tuple[str, ...]:
        """The keys of the state, which are also its names in a checkpoint."""

    def init(self, value: Tensor) -> dict[str, Tensor]:
        """A fresh state for `value`: tensors of its shape under `state_names`."""

    def update(
        self,
        value: Tensor,
        grad: Tensor,
        state: MutableMapping[str, Tensor],
        *,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """Change `value` and `state` in place; `grad` is left alone.

        `weight_decay` is decoupled (value ← value · (1 - lr · weight_decay)); `step` counts
        updates from 1.
        """


@runtime_checkable
class OnePassRule(UpdateRule, Protocol):
    """A rule that also scales the gradient and writes the rounded copy, in its one pass."""

    def update_once(
        self,
        value: Tensor,
        grad: Tensor,
        state: MutableMapping[str, Tensor],
        *,
        lr: float,
        weight_decay: float,
        step: int,
        grad_scale: float,
        copy: Tensor | None,
    ) -> None:
        """As `update` with `grad · grad_scale`; then `copy`, of the shape of `value`, is `value`
        rounded to its dtype. `grad` may be scaled in place.
        """


@dataclass(frozen=True, kw_only=True)
class SGD:
    """`UpdateRule`: stochastic gradient descent with heavy-ball momentum and decoupled decay.

    value ← value · (1 - lr · weight_decay) - lr · m, with m ← momentum · m + grad.
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"SGD: momentum is {self.momentum}, must be at least 0 and below 1")

    @property
    def state_names(self) -> tuple[str, ...]:
        """See `UpdateRule`."""
        return ("momentum",) if self.momentum else ()

    def init(self, value: Tensor) -> dict[str, Tensor]:
        """See `UpdateRule`."""
        return {name: torch.zeros_like(value) for name in self.state_names}

    def update(
        self,
        value: Tensor,
        grad: Tensor,
        state: MutableMapping[str, Tensor],
        *,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """See `UpdateRule`."""
        with torch.no_grad():
            if weight_decay:
                value.mul_(1.0 - lr * weight_decay)
            if self.momentum:
                grad = state["momentum"].mul_(self.momentum).add_(grad)
            value.add_(grad, alpha=-lr)
