"""SwiGLU in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mcore_kernels.protocols import accumulation_dtype


def swiglu(gate_up: Tensor) -> Tensor:
    """See `mcore_kernels.protocols.SwigluOp`."""
    check_even(gate_up)
    gate, up = gate_up.to(accumulation_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def check_even(gate_up: Tensor) -> None:
    """ValueError unless the last dim holds two equal halves."""
    if gate_up.shape[-1] % 2:
        raise ValueError(
            f"swiglu: the last dim holds gate and up, so it is even; got {gate_up.shape[-1]}, "
            f"nearest {gate_up.shape[-1] - 1} or {gate_up.shape[-1] + 1}"
        )
