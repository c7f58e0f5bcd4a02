"""Where operators find the buffer to which they add the gradient of a weight themselves."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class _Places(Protocol):
    """The flat buffer of a bucket, see `GradientBuffer`."""

    kept: bool

    def place(self, index: int) -> tuple[Tensor, bool]: ...


class MainGrad:
    """The attribute `main_grad` of a parameter in a bucket: where its gradient lies.

    It may have no memory, or that of the step before, until it is asked for.
    """

    def __init__(self, places: _Places, index: int, shape: torch.Size) -> None:
        self._places, self._index, self._shape = places, index, shape

    @property
    def is_lasting(self) -> bool:
        """Whether it has the same memory in every pass: who asks early may add late."""
        return self._places.kept

    def __call__(self) -> Tensor:
        """Return the buffer, to be added to."""
        buffer, blank = self.take()
        return buffer.zero_() if blank else buffer

    def take(self) -> tuple[Tensor, bool]:
        """Return the buffer, and whether the caller has to write over it rather than add to it."""
        buffer, blank = self._places.place(self._index)
        return buffer.view(self._shape), blank


def main_grad(parameter: Tensor) -> Tensor:
    """Return the buffer to which the gradient of a parameter in a bucket is added.

    Its attribute `main_grad` is that buffer, or a function that returns it (`MainGrad`).
    """
    buffer = parameter.main_grad  # type: ignore[attr-defined]
    found: Tensor = buffer() if callable(buffer) else buffer
    return found


def has_lasting_main_grad(parameter: Tensor) -> bool:
    """Whether there is such a buffer, of which a forward pass may keep hold for its backward."""
    buffer = getattr(parameter, "main_grad", None)
    return buffer.is_lasting if isinstance(buffer, MainGrad) else isinstance(buffer, Tensor)


def take_main_grad(parameter: Tensor) -> tuple[Tensor, bool]:
    """Return that buffer, and whether it is to be written over: what it has is no gradient.

    Who asks has to write: the first gradient of a step then neither waits for zeros nor reads them.
    """
    buffer = parameter.main_grad  # type: ignore[attr-defined]
    return buffer.take() if isinstance(buffer, MainGrad) else (main_grad(parameter), False)


def added_to_main(parameter: Any) -> Tensor:
    """Say that a gradient is in `main_grad`; return the tensor without meaning for autograd."""
    parameter.grad_added_to_main = True
    # Nobody reads it: only anomaly detection would, and mind what is in it.
    empty = torch.zeros_like if torch.is_anomaly_enabled() else torch.empty_like
    return empty(parameter)
