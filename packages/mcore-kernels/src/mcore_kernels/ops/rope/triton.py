"""Rotary position embedding in Triton. Imported only when it is chosen, because it imports triton.

Shapes: T tokens, N heads, D head size, R rotary size. A program takes HEADS heads of one token.
The gradient of a rotation is the rotation by the opposite angle, so only the angles are kept.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take pointers and strides by position

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary, on_device
from mcore_kernels.ops.rope.reference import check_rotary


@triton.jit
def _rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    stride_token,
    stride_head,
    num_heads,
    size,
    half,
    sign,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    known = pair < half
    cos = tl.load(cos_ptr + token * half + pair, mask=known, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * half + pair, mask=known, other=0.0).to(tl.float32) * sign
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + half
    mask = (head < num_heads) & known
    source = x_ptr + token * stride_token + head * stride_head
    target = y_ptr + (token * num_heads + head) * size
    a = tl.load(source + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + first, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(target + second, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=mask)
    if TAIL > 0:
        rest = 2 * half + tl.arange(0, TAIL)[None, :]
        mask = (head < num_heads) & (rest < size)
        tl.store(target + rest, tl.load(source + rest, mask=mask), mask=mask)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    y = _rotate_fake(x, cos, sin, interleaved, inverse)
    if not x.numel():
        return y
    x = x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()
    tokens, heads, size = x.shape
    half = cos.shape[-1]
    tail = size - 2 * half
    block = triton.next_power_of_2(half)
    # About 4,096 elements for a program: a whole token of most models.
    together = min(triton.next_power_of_2(heads), max(1, 2048 // block))
    with on_device(x):
        _rotate_kernel[(tokens, triton.cdiv(heads, together))](
            x, cos.contiguous(), sin.contiguous(), y, x.stride(0), x.stride(1), heads, size, half,
            -1.0 if inverse else 1.0, INTERLEAVED=interleaved, HEADS=together, HALF=block,
            TAIL=triton.next_power_of_2(tail) if tail else 0,
        )  # fmt: skip
    return y


def _rotate_fake(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


_LIBRARY = OpLibrary()
_rope = _LIBRARY.define(
    "rope(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool inverse) -> Tensor",
    _rotate,
    fake=_rotate_fake,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    return _rope(dy, cos, sin, ctx.interleaved, not ctx.inverse), None, None, None, None


_LIBRARY.differentiate("rope", _gradients, keep=_keep)


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """See `mcore_kernels.protocols.RopeOp`; ValueError when R exceeds D or rows do not match."""
    check_rotary(q, k, cos)
    return (
        _rope(q, cos, sin, interleaved, False),
        _rope(k, cos, sin, interleaved, False),
    )
