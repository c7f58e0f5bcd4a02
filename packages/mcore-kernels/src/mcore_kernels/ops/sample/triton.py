"""Sampling in Triton. Imported only when it is chosen, because it imports triton.

The token is the reference's, because all that decides about it is computed in float64. Four
launches: the largest logits, weights and how they are spread, the entries that can matter, and a
program for each row that draws among these. A row is read three times, by many processors, and
nothing is sorted.

Memory beside results: 8 bytes for each logit, and 256 counts for each piece of a row.
"""

# ruff: noqa: PLR0917 -- operators of torch take what they are given by position

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary, on_device
from mcore_kernels.ops.chunks_triton import lying
from mcore_kernels.ops.sample.triton_kernels import (
    STEPS,
    draw_kernel,
    gather_kernel,
    largest_kernel,
    spread_kernel,
)
from mcore_kernels.tuning import tuned


def _sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    tokens, logprobs = _fake(logits, uniform, temperature, top_k, top_p, min_p)
    rows, size = logits.shape
    if not rows:
        return tokens, logprobs
    logits = lying(logits)
    split, warps, block, draw_warps = tuned(
        "sample", logits.device, "split", "warps", "block", "draw_warps"
    )
    splits = triton.cdiv(size, split)
    grid, sizes = (rows, splits), (size, logits.stride(0))
    pieces = {"SPLIT": split, "SPLITS": triton.next_power_of_2(splits)}
    cuts = {"TOP_K": top_k is not None, "TOP_P": top_p is not None, "MIN_P": min_p is not None}
    rule = [
        (temperature if one is None else one).contiguous()
        for one in (temperature, top_k, top_p, min_p)
    ]
    wide = uniform.to(torch.float64).contiguous()
    largest = logits.new_empty(grid, dtype=torch.float32)
    sums = wide.new_empty(grid)
    counts = tokens.new_empty(*grid, STEPS.value, dtype=torch.int32)
    near, ids = largest.new_empty(rows, size), counts.new_empty(rows, size)
    number = counts.new_empty(rows)
    with on_device(logits):
        largest_kernel[grid](logits, largest, *sizes, SPLIT=split, num_warps=warps)
        spread_kernel[grid](
            logits, largest, rule[0], sums, counts, *sizes, **pieces, num_warps=warps
        )
        gather_kernel[grid](
            logits, largest, *rule, sums, counts, near, ids, number, *sizes, **pieces, **cuts,
            num_warps=warps,
        )  # fmt: skip
        draw_kernel[(rows,)](
            logits, wide, largest, *rule, sums, near, ids, number, tokens, logprobs, *sizes,
            splits, **pieces, **cuts, BLOCK=block, num_warps=draw_warps,
        )  # fmt: skip
    return tokens, logprobs


def _fake(logits: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    tokens = logits.new_empty(rows, dtype=torch.int64)
    return tokens, logits.new_empty(rows, dtype=torch.float32)


_LIBRARY = OpLibrary()
_operator = _LIBRARY.define(
    "sample(Tensor logits, Tensor uniform, Tensor temperature, Tensor? top_k, Tensor? top_p, "
    "Tensor? min_p) -> (Tensor, Tensor)",
    _sample,
    fake=_fake,
)


def sample(
    logits: Tensor,
    uniform: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `mcore_kernels.protocols.SampleOp`."""
    found: tuple[Tensor, Tensor] = _operator(
        logits.detach(), uniform, temperature, top_k, top_p, min_p
    )
    return found
