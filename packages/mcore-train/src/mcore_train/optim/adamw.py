"""Adam with decoupled weight decay."""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_kernels import AdamRule


@dataclass(frozen=True, kw_only=True)
class AdamW(AdamRule):
    """`AdamRule` that also scales gradients and writes rounded copies, in the operator's one pass.

    Satisfies `mcore_parallel.protocols.OnePassRule`.
    """

    @torch.no_grad()
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
        """As `update` with `grad · grad_scale`, and then `copy` is `value` rounded to its dtype."""
        scale = None
        if grad_scale != 1.0:
            scale = torch.full((), grad_scale, dtype=torch.float32, device=value.device)
        self.op(
            value, grad, *(state[name] for name in self.state_names), lr=lr, beta1=self.beta1,
            beta2=self.beta2, eps=self.eps, weight_decay=weight_decay, step=step,
            decoupled=self.decoupled, grad_scale=scale, copy=copy,
        )  # fmt: skip
