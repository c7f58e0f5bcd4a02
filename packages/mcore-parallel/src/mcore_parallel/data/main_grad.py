"""Where operators find the buffer to which they add the gradient of a weight themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def main_grad(parameter: Tensor) -> Tensor:
    """Return the buffer to which the gradient of a parameter in a bucket is added.

    Its attribute `main_grad` is that buffer, or a function that returns it: where gradients are
    sharded it has memory only while it is used.
    """
    buffer = parameter.main_grad  # type: ignore[attr-defined]
    found: Tensor = buffer() if callable(buffer) else buffer
    return found


def added_to_main(parameter: Any) -> Tensor:
    """Say that a gradient is in `main_grad`; return the tensor without meaning for autograd."""
    parameter.grad_added_to_main = True
    # Nobody reads it: only anomaly detection would, and mind what is in it.
    empty = torch.zeros_like if torch.is_anomaly_enabled() else torch.empty_like
    return empty(parameter)
