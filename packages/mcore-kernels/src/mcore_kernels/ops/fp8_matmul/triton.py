"""The product of numbers of 8 bits in Triton, for scales of any block. Imported when it is chosen.

What is summed comes in pieces of 128, the width of the blocks: each piece is multiplied with its
scales in float32 and then added, so that no sum on the tensor cores is longer than that.

Shapes: M, N rows of the factors, K summed.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take pointers and strides by position

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary, interpreted, on_device
from mcore_kernels.ops.fp8_matmul.reference import fp8_matmul as reference
from mcore_kernels.quant.scaling import Block
from mcore_kernels.tuning import tuned


@triton.jit
def _matmul_kernel(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    y_ptr,
    m,
    n,
    k,
    a_row,
    a_piece,
    b_row,
    b_piece,
    A_ROWS: tl.constexpr,
    B_ROWS: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tiles_m = tl.cdiv(m, BLOCK_M)
    # Neighbouring programs share rows of b.
    row = (tl.program_id(0) % tiles_m).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (tl.program_id(0) // tiles_m).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    at_a = a_scale_ptr + row // A_ROWS * a_row
    at_b = b_scale_ptr + col // B_ROWS * b_row
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for piece in range(0, tl.cdiv(k, 128)):
        inner = piece * 128 + tl.arange(0, 128)
        a = tl.load(
            a_ptr + row[:, None] * k + inner[None, :],
            mask=(row < m)[:, None] & (inner < k)[None, :],
            other=0.0,
        )
        b = tl.load(
            b_ptr + col[None, :] * k + inner[:, None],
            mask=(col < n)[None, :] & (inner < k)[:, None],
            other=0.0,
        )
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        product = tl.dot(a, b, input_precision="ieee")
        down = tl.load(at_a + piece * a_piece, mask=row < m, other=0.0)
        across = tl.load(at_b + piece * b_piece, mask=col < n, other=0.0)
        total += product * down[:, None] * across[None, :]
    mask = (row < m)[:, None] & (col < n)[None, :]
    tl.store(y_ptr + row[:, None] * n + col[None, :], total.to(y_ptr.dtype.element_ty), mask=mask)


def fp8_matmul(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    a_block: Block,
    b_block: Block,
    dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """See `mcore_kernels.protocols.Fp8MatmulOp`; other blocks are served by the reference."""
    blocks = ((0, 0), (1, 0), (1, 128), (128, 128))
    if a_block not in blocks or b_block not in blocks or dtype == torch.float64 or not a.numel():
        return reference(
            a, a_scale, b, b_scale, a_block=a_block, b_block=b_block, dtype=dtype, fast=fast
        )
    y: Tensor = _product_op(a, a_scale, b, b_scale, a_block, b_block, dtype)
    return y


def _product(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_block: Block,
    b_block: Block,
    dtype: torch.dtype,
) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    y = torch.empty(m, n, dtype=dtype, device=a.device)
    if not y.numel():
        return y
    block_m, block_n, warps, stages = tuned(
        "fp8_matmul", a.device, "block_m", "block_n", "warps", "stages"
    )
    a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous()
    with on_device(a):
        _matmul_kernel[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
            a.contiguous(), a_scale, b.contiguous(), b_scale, y, m, n, k,
            *_steps(a_scale, a_block), *_steps(b_scale, b_block),
            A_ROWS=max(a_block[0], 1), B_ROWS=max(b_block[0], 1), WIDEN=interpreted(a),
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return y


def _product_fake(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_block: Block,
    b_block: Block,
    dtype: torch.dtype,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


_LIBRARY = OpLibrary()
_product_op = _LIBRARY.when_compiled(
    "fp8_matmul(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, int[] a_block, int[] b_block, "
    "ScalarType dtype) -> Tensor",
    _product,
    fake=_product_fake,
)


def _steps(scale: Tensor, block: Block) -> tuple[int, int]:
    """How far the next block is, down and along."""
    return scale.shape[1] if block[0] else 0, 1 if block[1] else 0
