"""Adam as an update rule of an optimizer."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_kernels.ops.adam.reference import adam, check_moment
from mcore_kernels.protocols import AdamOp

_NAMES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class AdamRule:
    """An update rule of `mcore_parallel` (`UpdateRule`) from an operator.

    Attributes:
        op: `Kernels(…).adam`; default: plain torch.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        decoupled: AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), or Adam with the decay in
            the gradient.
        state_dtype: float32 moments, or bfloat16 ones of half the size.

    Raises:
        ValueError: a value is out of range, or a bfloat16 moment could not decay.
    """

    op: AdamOp = adam
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decoupled: bool = True
    state_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for beta, name in zip((self.beta1, self.beta2), _NAMES, strict=True):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"adam: the decay of {name} is {beta}, must lie in 0 <= beta < 1")
            check_moment(name, self.state_dtype, beta)
        if not self.eps > 0:
            raise ValueError(f"adam: eps must be positive, got {self.eps}")

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the moments."""
        return _NAMES

    def init(self, value: Tensor) -> dict[str, Tensor]:
        """Return moments of zeros, of the shape of `value`."""
        # A float64 value gets float64 moments.
        dtype = value.dtype if value.dtype == torch.float64 else self.state_dtype
        return {name: torch.zeros_like(value, dtype=dtype) for name in _NAMES}

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
        """Change `value` and `state` in place."""
        self.op(
            value, grad, *(state[name] for name in _NAMES), lr=lr, beta1=self.beta1,
            beta2=self.beta2, eps=self.eps, weight_decay=weight_decay, step=step,
            decoupled=self.decoupled,
        )  # fmt: skip
