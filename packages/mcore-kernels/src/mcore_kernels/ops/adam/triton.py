"""Adam in Triton: one pass over the buffers. Imported only when it is chosen.

Shapes: N elements. A program takes BLOCK of them.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,no-any-return"
# ruff: noqa: PLR0917 -- kernels take pointers and numbers by position

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary, on_device
from mcore_kernels.ops.adam.reference import check
from mcore_kernels.tuning import tuned


@triton.jit
def _adam_kernel(
    value_ptr,
    grad_ptr,
    mean_ptr,
    square_ptr,
    copy_ptr,
    scale_ptr,
    skip_ptr,
    n,
    rate,
    keep,
    decay,
    beta1,
    beta2,
    rest1,
    rest2,
    root,
    eps,
    SCALE: tl.constexpr,
    SKIP: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    value = tl.load(value_ptr + at, mask=mask, other=0.0)
    live = True
    if SKIP:
        live = tl.load(skip_ptr) == 0
    if live:
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if SCALE:
            grad *= tl.load(scale_ptr)
        grad += decay * value
        mean = tl.load(mean_ptr + at, mask=mask, other=0.0).to(tl.float32)
        square = tl.load(square_ptr + at, mask=mask, other=0.0).to(tl.float32)
        mean = beta1 * mean + rest1 * grad
        square = beta2 * square + rest2 * grad * grad
        # Reads as the formula does: root is √(1 - beta2ᵗ), rate is lr / (1 - beta1ᵗ).
        value = value * keep - rate * mean / (tl.sqrt(square) / root + eps)
        tl.store(value_ptr + at, value, mask=mask)
        tl.store(mean_ptr + at, mean.to(mean_ptr.dtype.element_ty), mask=mask)
        tl.store(square_ptr + at, square.to(square_ptr.dtype.element_ty), mask=mask)
    if COPY:
        tl.store(copy_ptr + at, value.to(copy_ptr.dtype.element_ty), mask=mask)


def _adam(
    value: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    copy: Tensor | None,
    grad_scale: Tensor | None,
    skip: Tensor | None,
    numbers: list[float],
) -> None:
    n = value.numel()
    if not n:
        return
    block, warps = tuned("adam", value.device, "block", "warps")
    with on_device(value):
        _adam_kernel[(triton.cdiv(n, block),)](
            value, grad, exp_avg, exp_avg_sq, value if copy is None else copy,
            value if grad_scale is None else grad_scale, value if skip is None else skip,
            n, *numbers, SCALE=grad_scale is not None, SKIP=skip is not None,
            COPY=copy is not None, BLOCK=block, num_warps=warps,
        )  # fmt: skip


def _adam_fake(*arguments: object) -> None:
    return


_LIBRARY = OpLibrary()
_adam_op = _LIBRARY.define(
    "adam(Tensor(a!) value, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
    "Tensor(d!)? copy, Tensor? grad_scale, Tensor? skip, float[] numbers) -> ()",
    _adam,
    fake=_adam_fake,
)


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
    numbers = [
        lr / (1 - beta1**step),
        1 - lr * weight_decay if decoupled else 1.0,
        0.0 if decoupled else weight_decay,
        beta1,
        beta2,
        1 - beta1,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        eps,
    ]
    _adam_op(value.detach(), grad.detach(), exp_avg, exp_avg_sq, copy, grad_scale, skip, numbers)
