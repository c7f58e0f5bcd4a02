"""What the Triton kernels of the scan can take. Apart from them, because they import triton."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_HEAD = 128
MAX_STATE = 256
MAX_FLOAT32 = 8192
"""Numbers of a float32 state: a chunk's kernel has two of them and its rows in shared memory."""


def limits(x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, **_: object) -> str | None:
    """None where the kernels can serve the call, else why not; `check` has the rest."""
    size, state = x.shape[-1], b.shape[-1]
    if x.dtype == torch.float64:
        return "takes no float64"
    if not x.dtype == b.dtype == c.dtype:
        return f"x, b and c have one dtype, got {x.dtype}, {b.dtype} and {c.dtype}"
    if size > MAX_HEAD or state > MAX_STATE:
        return f"takes heads of at most {MAX_HEAD} with states of {MAX_STATE}, got {size}, {state}"
    if x.dtype == torch.float32 and size * state > MAX_FLOAT32:
        return f"takes float32 states of at most {MAX_FLOAT32} numbers, got {size} x {state}"
    return None
