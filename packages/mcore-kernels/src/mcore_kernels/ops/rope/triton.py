"""Rotary position embedding in Triton. Imported only when it is chosen, because it imports triton.

Shapes: T tokens, N heads, D head size, R rotary size. A program takes HEADS heads of one token,
of q or of k. The gradient of a rotation is the rotation by the opposite angle, so only the angles
are kept.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take pointers and strides by position

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary, on_device
from mcore_kernels.ops.rope.limits import limits
from mcore_kernels.ops.rope.reference import ReferenceRope, check_no_grad, check_rotary
from mcore_kernels.tuning import tuned


@triton.jit
def _turn(
    x_ptr,
    y_ptr,
    cos,
    sin,
    token,
    block,
    stride_token,
    stride_head,
    stride_token_y,
    stride_head_y,
    num_heads,
    size,
    half,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
):
    head = block * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + half
    mask = (head < num_heads) & (pair < half)
    source = x_ptr + token * stride_token + head * stride_head
    target = y_ptr + token * stride_token_y + head * stride_head_y
    a = tl.load(source + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + first, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(target + second, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=mask)
    if TAIL > 0:
        rest = 2 * half + tl.arange(0, TAIL)[None, :]
        mask = (head < num_heads) & (rest < size)
        tl.store(target + rest, tl.load(source + rest, mask=mask), mask=mask)


@triton.jit
def _rotate_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out,
    k_out,
    q_token,
    q_head,
    q_out_token,
    q_out_head,
    k_token,
    k_head,
    k_out_token,
    k_out_head,
    q_heads,
    k_heads,
    q_size,
    k_size,
    half,
    sign,
    q_blocks,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    Q_TAIL: tl.constexpr,
    K_TAIL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_ptr + token * half + pair, mask=pair < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * half + pair, mask=pair < half, other=0.0).to(tl.float32) * sign
    if block < q_blocks:
        _turn(
            q_ptr, q_out, cos, sin, token, block, q_token, q_head, q_out_token, q_out_head,
            q_heads, q_size, half, INTERLEAVED, HEADS, HALF, Q_TAIL,
        )  # fmt: skip
    else:
        _turn(
            k_ptr, k_out, cos, sin, token, block - q_blocks, k_token, k_head, k_out_token,
            k_out_head, k_heads, k_size, half, INTERLEAVED, HEADS, HALF, K_TAIL,
        )  # fmt: skip


def _launch(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    outputs: tuple[Tensor, Tensor],
    options: tuple[bool, bool, bool],
) -> None:
    """Write turned q and k into `outputs`; options: interleaved, inverse, copy what stays."""
    interleaved, inverse, copy = options
    tokens, half = q.shape[0], cos.shape[-1]
    if not tokens:
        return
    block = triton.next_power_of_2(half)
    pairs, warps = tuned("rope", q.device, "pairs", "warps")
    heads = max(q.shape[1], k.shape[1])
    together = min(triton.next_power_of_2(heads), max(1, pairs // block))
    q_blocks, k_blocks = (triton.cdiv(x.shape[1], together) for x in (q, k))
    tails = [x.shape[2] - 2 * half if copy else 0 for x in (q, k)]
    q_out, k_out = outputs
    strides = [x.stride(i) for x in (q, q_out, k, k_out) for i in (0, 1)]
    with on_device(q):
        _rotate_kernel[(tokens, q_blocks + k_blocks)](
            q, k, cos.contiguous(), sin.contiguous(), q_out, k_out, *strides, q.shape[1],
            k.shape[1], q.shape[2], k.shape[2], half, -1.0 if inverse else 1.0, q_blocks,
            INTERLEAVED=interleaved, HEADS=together, HALF=block,
            Q_TAIL=triton.next_power_of_2(tails[0]) if tails[0] else 0,
            K_TAIL=triton.next_power_of_2(tails[1]) if tails[1] else 0, num_warps=warps,
        )  # fmt: skip


def _lying(x: Tensor) -> bool:
    return x.stride(2) == 1 or x.shape[2] == 1


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    outputs = _rotate_fake(q, k, cos, sin, interleaved, inverse)
    q, k = (x if _lying(x) else x.contiguous() for x in (q, k))
    _launch(q, k, cos, sin, outputs, (interleaved, inverse, True))
    return outputs


def _rotate_fake(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _rotate_inplace(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    lying = [x if _lying(x) else x.contiguous() for x in (q, k)]
    # A program reads its pairs before it writes them, and no other program reads them.
    _launch(lying[0], lying[1], cos, sin, (lying[0], lying[1]), (interleaved, False, False))
    for x, turned in zip((q, k), lying, strict=True):
        if turned is not x:
            x.copy_(turned)


def _rotate_inplace_fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    return None


_LIBRARY = OpLibrary()
_rope = _LIBRARY.define(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool inverse) "
    "-> (Tensor, Tensor)",
    _rotate,
    fake=_rotate_fake,
)
_rope_inplace = _LIBRARY.define(
    "rope_inplace(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, bool interleaved) -> ()",
    _rotate_inplace,
    fake=_rotate_inplace_fake,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    dq, dk = _rope(dq, dk, cos, sin, ctx.interleaved, not ctx.inverse)
    return dq, dk, None, None, None, None


_LIBRARY.differentiate("rope", _gradients, keep=_keep, twice=True)


class TritonRope:
    """`mcore_kernels.protocols.RopeOp`: q and k in one launch."""

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See `RopeOp`; ValueError when R exceeds D or rows do not match."""
        check_rotary(q, k, cos)
        return _rope(q, k, cos, sin, interleaved, False)

    def inplace(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
    ) -> None:
        """See `RopeOp`; float64 is served by the reference."""
        if limits(q, k, cos, sin, interleaved) is not None:
            _REFERENCE.inplace(q, k, cos, sin, interleaved)
            return
        check_rotary(q, k, cos)
        check_no_grad(q, k)
        _rope_inplace(q, k, cos, sin, interleaved)


_REFERENCE = ReferenceRope()
ROPE = TritonRope()
"""The operator; it holds no state."""
