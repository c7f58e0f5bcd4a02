"""Where operators find the buffer to which they add the gradient of a weight themselves."""

from __future__ import annotations

from torch import Tensor


def main_grad(parameter: Tensor) -> Tensor:
    """Return the buffer to which the gradient of a parameter in a bucket is added.

    Its attribute `main_grad` is that buffer, or a function that returns it: where gradients are
    sharded it has memory only while it is used.
    """
    buffer = parameter.main_grad  # type: ignore[attr-defined]
    found: Tensor = buffer() if callable(buffer) else buffer
    return found
