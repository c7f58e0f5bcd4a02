"""Losses of layers, which have a gradient where they arise and a value that is reported."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mcore_models.common.batch import GlobalCounts


class AuxiliaryLosses:
    """Takes the auxiliary losses of some forward passes, on whatever pipeline stage.

    They follow the rule of the loss: every rank and micro-batch adds its share, already divided by
    the global count, and the shares of all of them add up to the value. Gradients need no way to
    the last stage: `attach` hangs a share on the hidden states, and the backward pass of these also
    runs that of the share, with gradient 1. That is also when the value is counted, so that a
    forward pass that is run again, to recompute activations, counts once.

    In the same way it counts which experts were chosen (`count`, `choices`).

    counts: totals over the global batch. names: of all losses of the model, also those that do not
    arise on this stage, in an order that is the same on every rank.
    """

    def __init__(self, counts: GlobalCounts, names: Sequence[str] = ()) -> None:
        self.counts = counts
        self._shares: dict[str, Tensor | None] = dict.fromkeys(names)
        self._choices: dict[int, Tensor] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the losses, in the same order on every rank."""
        return tuple(self._shares)

    def attach(
        self, hidden: Tensor, name: str, share: Tensor, value: Tensor | None = None
    ) -> Tensor:
        """Return `hidden` itself, in whose backward pass `share`, a scalar, gets its gradient.

        value: what is counted in its place, if it is another.

        Raises:
            ValueError: there is no loss of that name.
        """
        if name not in self._shares:
            raise ValueError(f"no auxiliary loss {name!r}: there are {', '.join(self.names)}")

        def count(value: Tensor) -> None:
            before, value = self._shares[name], value.double()
            self._shares[name] = value if before is None else before + value

        value = share if value is None else value
        return cast(Tensor, _Attach.apply(hidden, share, value, count))  # type: ignore[no-untyped-call]

    def count(self, hidden: Tensor, layer: int, choices: Tensor) -> Tensor:
        """Return `hidden` itself, in whose backward pass `choices` [E] of a layer are counted."""

        def add(value: Tensor) -> None:
            before = self._choices.get(layer)
            self._choices[layer] = value if before is None else before + value

        return cast(Tensor, _Attach.apply(hidden, choices, choices, add))  # type: ignore[no-untyped-call]

    @property
    def choices(self) -> Mapping[int, Tensor]:
        """How many of this rank's tokens chose each expert so far, [E] by layer."""
        return self._choices

    def shares(self) -> dict[str, Tensor]:
        """Return this rank's part of each value so far, scalars in float64; 0 where none arose."""
        return {
            name: torch.zeros((), dtype=torch.float64) if share is None else share
            for name, share in self._shares.items()
        }


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, share: Tensor, value: Tensor, count: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.count, ctx.value = count, value.detach()
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.count(ctx.value)
        return grad, torch.ones_like(ctx.value) if ctx.needs_input_grad[1] else None, None, None
