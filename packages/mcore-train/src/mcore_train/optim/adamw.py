"""Adam with decoupled weight decay."""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay on fp32 tensors of any shape, element by element.

    Satisfies `mcore_parallel.protocols.UpdateRule`. With m and v the bias-corrected moments,
    value ← value·(1 − lr·weight_decay) − lr·m/(√v + eps) (Loshchilov & Hutter, 2019).
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

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
        """Update `value` and the moments in place; `step` counts from 1.

        On CUDA in one pass, by the kernel behind `torch.optim.AdamW(fused=True)`.
        """
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        if value.is_cuda:
            count = torch.full((), float(step), device=value.device)
            torch._fused_adamw_(
                [value], [grad], [mean], [square], [], [count],
                lr=lr, beta1=self.beta1, beta2=self.beta2, weight_decay=weight_decay,
                eps=self.eps, amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
            )  # fmt: skip
            return
        mean.lerp_(grad, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        if weight_decay:
            value.mul_(1 - lr * weight_decay)
        correction = (1 - self.beta2**step) ** 0.5
        denominator = square.sqrt().div_(correction).add_(self.eps)
        value.addcdiv_(mean, denominator, value=-lr / (1 - self.beta1**step))
