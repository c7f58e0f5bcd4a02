"""Adam in plain torch. Shapes: N elements."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_kernels.protocols import accumulation_dtype


def check(  # noqa: PLR0917 -- the tensors of AdamOp, as they came
    value: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    copy: Tensor | None,
    betas: tuple[float, float],
    step: int,
) -> None:
    """Raise ValueError where the arguments of `AdamOp` do not fit together."""
    if step < 1:
        raise ValueError(f"adam: step counts from 1, got {step}")
    named = {"value": value, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if copy is not None:
        named["copy"] = copy
    for name, tensor in named.items():
        if tensor.shape != value.shape:
            raise ValueError(
                f"adam: {name} has shape {list(tensor.shape)}, value {list(value.shape)}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"adam: {name} must lie in one piece, has strides {tensor.stride()}")
    for name, beta in zip(("exp_avg", "exp_avg_sq"), betas, strict=True):
        check_moment(name, named[name].dtype, beta)


def check_moment(name: str, dtype: torch.dtype, beta: float) -> None:
    """Raise ValueError unless a moment of this dtype is served, and can decay at this rate.

    A bfloat16 number that shrinks by a part 1 - beta comes back to itself where that part is below
    half a unit in its last place, 2^-8 of it at most: the moment could grow only.
    """
    if dtype in (torch.float32, torch.float64):
        return
    if dtype != torch.bfloat16:
        raise ValueError(f"adam: {name} must be float32 or bfloat16, got {dtype}")
    if 1.0 - beta < 2.0**-8:
        raise ValueError(
            f"adam: a bfloat16 {name} cannot decay with beta={beta}; it needs at most {1 - 2**-8}, "
            "or float32"
        )


@torch.no_grad()
def adam(
    value: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool = True,
    grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
    copy: Tensor | None = None,
) -> None:
    """See `mcore_kernels.protocols.AdamOp`."""
    check(value, grad, exp_avg, exp_avg_sq, copy, (beta1, beta2), step)
    wide = accumulation_dtype(value.dtype)
    g = grad.to(wide)
    if grad_scale is not None:
        g = g * grad_scale.to(wide)
    if weight_decay and not decoupled:
        g = g.add(value, alpha=weight_decay)
    # In place, unless it may have to be undone or is to be rounded.
    new, mean, square = (
        x if skip is None and x.dtype == wide else x.to(wide, copy=True)
        for x in (value, exp_avg, exp_avg_sq)
    )
    mean.lerp_(g, 1 - beta1)
    square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    if weight_decay and decoupled:
        new.mul_(1 - lr * weight_decay)
    denominator = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    new.addcdiv_(mean, denominator, value=-lr / (1 - beta1**step))
    for old, result in ((value, new), (exp_avg, mean), (exp_avg_sq, square)):
        if skip is not None:
            old.copy_(torch.where(skip == 0, result.to(old.dtype), old))
        elif result is not old:
            old.copy_(result)
    if copy is not None:
        copy.copy_(value)
