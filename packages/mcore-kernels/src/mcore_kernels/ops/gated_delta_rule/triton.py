"""The gated delta rule in Triton. Imported only when it is chosen, because it imports triton.

Forward: the triangular systems of all chunks side by side, states from chunk to chunk (a program
for each document, head and columns of its state), then all outputs side by side. The backward is
plain torch's: only arguments are kept, and the chunks are computed again there. Numbers of 16 bits
are multiplied as such and summed in float32.

Shapes: T tokens, N documents, K key heads of size D, h heads with values of size Dv.
"""

# ruff: noqa: PLR0917 -- operators of torch take what they are given by position

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary, on_device
from mcore_kernels.ops.chunks_triton import Chunks, chunk_length, lying, matrix_options, padded
from mcore_kernels.ops.gated_delta_rule.base import check
from mcore_kernels.ops.gated_delta_rule.chunked import gated_delta_rule as chunked
from mcore_kernels.ops.gated_delta_rule.triton_kernels import (
    carry_kernel,
    outputs_kernel,
    solve_kernel,
    totals_kernel,
)
from mcore_kernels.tuning import tuned


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    ends: Tensor,
    scale: float,
    longest: int,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    y, states = _forward_fake(q, k, v, g, beta, initial, ends, scale, longest, chunk_size)
    if not v.numel() or not q.shape[2]:
        return y.zero_(), states.zero_() if initial is None else states.copy_(initial)
    q, k, v = lying(q), lying(k), lying(v)
    rows, heads, v_size = v.shape
    d_size, share, documents = q.shape[2], heads // q.shape[1], ends.shape[0] - 1
    pair, matrix = q.dtype == torch.float32, matrix_options(q)
    kernel = "gated_delta_rule_float32" if pair else "gated_delta_rule"
    most, columns, warps, stages = tuned(kernel, q.device, "length", "columns", "warps", "stages")
    options = {"PAIR": pair, **matrix, "num_warps": warps, "num_stages": stages}
    d, e, block = padded(d_size), padded(v_size), min(32, triton.next_power_of_2(heads))
    columns = min(columns, e)
    tiles = triton.cdiv(v_size, columns)
    with on_device(q):
        chunks = Chunks.of(ends, rows, chunk_length(most, chunk_size, longest))
        total = g.new_empty(1 + pair, heads, rows, dtype=torch.float32)
        totals_kernel[(chunks.most, triton.cdiv(heads, block))](
            g.contiguous(), total, *chunks.arguments(), heads, LENGTH=chunks.length, HEADS=block,
            PAIR=pair,
        )  # fmt: skip
        system = total.new_empty(chunks.most, heads, chunks.length, chunks.length)
        own, seen = v.new_empty(rows, heads, v_size), v.new_empty(rows, heads, d_size)
        solve_kernel[(chunks.most, heads)](
            k, v, beta.contiguous(), total, system, own, seen, *chunks.arguments(), heads, share,
            d_size, v_size, *k.stride()[:2], *v.stride()[:2], LENGTH=chunks.length, D=d, V=e,
            **options,
        )  # fmt: skip
        before = v.new_empty(chunks.most, heads, d_size, v_size)
        if documents:
            carry_kernel[(documents * heads, tiles)](
                k, total, own, seen, states if initial is None else initial.contiguous(), before,
                states, chunks.ends, chunks.first, rows, heads, share, d_size, v_size,
                *k.stride()[:2], INITIAL=initial is not None, LENGTH=chunks.length, D=d,
                V=columns, **options,
            )  # fmt: skip
        outputs_kernel[(chunks.most, heads, tiles)](
            q, k, total, own, before, y, *chunks.arguments(), heads, share, d_size, v_size, scale,
            *q.stride()[:2], *k.stride()[:2], LENGTH=chunks.length, D=d, V=columns, **options,
        )  # fmt: skip
    return y, states


def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    ends: Tensor,
    scale: float,
    longest: int,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    states = (ends.shape[0] - 1, v.shape[1], q.shape[2], v.shape[2])
    return v.new_empty(v.shape), v.new_empty(states, dtype=torch.float32)


def _backward(
    dy: Tensor,
    dstates: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    ends: Tensor,
    scale: float,
    longest: int,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta and the initial states."""
    given = (q, k, v, g, beta, *([] if initial is None else [initial]))
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in given]
        results = chunked(
            *leaves[:5], cu_seqlens=ends, max_seqlen=longest, scale=scale,
            initial_states=None if initial is None else leaves[5], chunk_size=chunk_size,
        )  # fmt: skip
        reached = [
            (one, grad)
            for one, grad in zip(results, (dy, dstates), strict=True)
            if one.requires_grad
        ]
        found = torch.autograd.grad(
            [one for one, _ in reached], leaves, [grad for _, grad in reached],
            materialize_grads=True,
        )  # fmt: skip
    grads = [one.clone() for one in found]
    return *grads, *([] if initial is not None else [torch.empty_like(dstates)])  # type: ignore[return-value]


def _backward_fake(
    dy: Tensor, dstates: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = (*given[:5], dstates if given[5] is None else given[5])
    return tuple(one.new_empty(one.shape) for one in like)


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial, Tensor ends, "
    "float scale, int longest, int chunk_size"
)
_LIBRARY = OpLibrary()
_rule = _LIBRARY.define(
    f"gated_delta_rule({_ARGUMENTS}) -> (Tensor, Tensor)", _forward, fake=_forward_fake
)
_rule_backward = _LIBRARY.define(
    f"gated_delta_rule_backward(Tensor dy, Tensor dstates, {_ARGUMENTS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    fake=_backward_fake,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.rest = inputs[7:]


def _gradients(ctx: Any, dy: Tensor, dstates: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    found = list(_rule_backward(dy, dstates, *saved, *ctx.rest))
    return *found[:5], None if saved[5] is None else found[5], None, None, None, None


_LIBRARY.differentiate("gated_delta_rule", _gradients, keep=_keep)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    uniform: tuple[int, int] | None = None,
    scale: float | None = None,
    initial_states: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """See `mcore_kernels.protocols.GatedDeltaRuleOp`; ValueError for shapes that do not fit.

    Of 16-bit inputs, states and what their chunks write are rounded to 16 bits where they are
    multiplied; they are carried in float32. The backward is `chunked`'s, which takes its memory.
    """
    check(
        q, k, v, g, beta, cu_seqlens=cu_seqlens, uniform=uniform, initial_states=initial_states,
        chunk_size=chunk_size,
    )  # fmt: skip
    longest = max_seqlen if uniform is None else uniform[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    found: tuple[Tensor, Tensor] = _rule(
        q, k, v, g, beta, initial_states, cu_seqlens.contiguous(), scale, longest, chunk_size
    )
    return found
