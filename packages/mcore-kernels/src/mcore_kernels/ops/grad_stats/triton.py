"""Norm and health of gradients in Triton. Imported only when it is chosen.

Every program sums its part of a buffer into a place of its own, and the places are summed at the
end: no atomics, so that the same gradients give the same bits.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary, on_device, programs
from mcore_kernels.ops.grad_stats.reference import accumulator
from mcore_kernels.tuning import tuned


@triton.jit
def _stats_kernel(x_ptr, out_ptr, n, places, BLOCK: tl.constexpr):
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    broken = tl.zeros((BLOCK,), dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(first, n, step):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        finite = tl.abs(x) < float("inf")
        squares += tl.where(finite, x * x, 0.0)
        broken += tl.where(finite, 0.0, 1.0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(squares, axis=0))
    tl.store(out_ptr + places + tl.program_id(0), tl.sum(broken, axis=0))


def _grad_stats(tensors: list[Tensor]) -> Tensor:
    block, per_processor, warps = tuned(
        "grad_stats", tensors[0].device, "block", "per_processor", "warps"
    )
    most = programs(tensors[0], per_processor=per_processor)
    counts = [min(most, triton.cdiv(x.numel(), block)) for x in tensors]
    wide, device = accumulator(tensors)
    partial = torch.zeros(2, sum(counts), dtype=wide, device=device)
    place = 0
    with on_device(tensors[0]):
        for x, count in zip(tensors, counts, strict=True):
            if count:
                _stats_kernel[(count,)](
                    x.contiguous(), partial[:, place:], x.numel(), partial.shape[1], BLOCK=block,
                    num_warps=warps,
                )  # fmt: skip
            place += count
    return partial.sum(1)


def _grad_stats_fake(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty(2, dtype=torch.float32)


_LIBRARY = OpLibrary()
_grad_stats_op = _LIBRARY.define(
    "grad_stats(Tensor[] tensors) -> Tensor", _grad_stats, fake=_grad_stats_fake
)


def grad_stats(tensors: Sequence[Tensor]) -> Tensor:
    """See `mcore_kernels.protocols.GradStatsOp`."""
    accumulator(tensors)
    return _grad_stats_op([x.detach() for x in tensors])
