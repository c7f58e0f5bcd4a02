"""Adam with decoupled weight decay."""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_kernels.protocols import AdamOp


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay on fp32 tensors of any shape, element by element.

    Satisfies `mcore_parallel.protocols.OnePassRule`. With m and v the bias-corrected moments,
    value ← value·(1 − lr·weight_decay) − lr·m/(√v + eps) (Loshchilov & Hutter, 2019).
    `op` does it all in one pass; without it torch's operators do.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    op: AdamOp | None = None

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors, also the prefixes of their global names."""
        return ("exp_avg", "exp_avg_sq")

    def init(self, value: Tensor) -> dict[str, Tensor]:
        """Return zero moments of the shape of `value`."""
        return {name: torch.zeros_like(value) for name in self.state_names}

    @torch.no_grad()
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
        """Update `value` and the moments in place; `step` counts from 1."""
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        if self.op is not None:
            self.op(
                value, grad, mean, square, lr=lr, weight_decay=weight_decay, step=step,
                beta1=self.beta1, beta2=self.beta2, eps=self.eps,
            )  # fmt: skip
            return
        mean.lerp_(grad, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        if weight_decay:
            value.mul_(1 - lr * weight_decay)
        correction = (1 - self.beta2**step) ** 0.5
        denominator = square.sqrt().div_(correction).add_(self.eps)
        value.addcdiv_(mean, denominator, value=-lr / (1 - self.beta1**step))

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
        """As `update` with `grad · grad_scale`, and then `copy` is `value` rounded to its dtype.

        Without `op` the gradient is scaled in place.
        """
        if self.op is None:
            scaled = grad if grad_scale == 1.0 else grad.mul_(grad_scale)
            self.update(value, scaled, state, lr=lr, weight_decay=weight_decay, step=step)
            if copy is not None:
                copy.copy_(value)
            return
        scale = None
        if grad_scale != 1.0:
            scale = torch.full((), grad_scale, dtype=torch.float32, device=value.device)
        self.op(
            value, grad, state["exp_avg"], state["exp_avg_sq"], lr=lr, weight_decay=weight_decay,
            step=step, beta1=self.beta1, beta2=self.beta2, eps=self.eps, grad_scale=scale,
            copy=copy,
        )  # fmt: skip
