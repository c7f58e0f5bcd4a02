"""Attention over pages in Triton. Imported only when it is chosen, because it imports triton.

A program takes BLOCK_Q queries of one sequence with all query heads of one kv head, so that each
page is read once for them, and walks over the keys that they see. With few sequences the keys are
cut into parts, for which programs leave partial results that are merged by their log-sum-exp
(arXiv:2311.01282). No length is read back from the device.

Shapes: T new tokens, N sequences, P rows of a page, Q query heads, K kv heads, D and Dv head sizes.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take pointers and strides by position

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary, interpreted, on_device, programs
from mcore_kernels.ops.attention.base import merge_sinks
from mcore_kernels.ops.paged_attention.reference import PAGED_CALL, check_pages, paged_fake
from mcore_kernels.tuning import tuned


@triton.jit
def _paged_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    length_ptr,
    ends_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    lse_ptr,
    stride_q_token,
    stride_q_head,
    stride_k_page,
    stride_k_row,
    stride_k_head,
    stride_v_page,
    stride_v_row,
    stride_v_head,
    stride_table,
    group,
    page,
    parts,
    tokens,
    heads,
    size,
    value_size,
    scale,
    window,
    softcap,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
):
    sequence = tl.program_id(2)
    kv_head = tl.program_id(1) // parts
    part = tl.program_id(1) % parts
    start = tl.load(ends_ptr + sequence)
    lq = tl.load(ends_ptr + sequence + 1) - start
    lk = tl.load(length_ptr + sequence)
    first = tl.program_id(0) * BLOCK_Q
    if first < lq:
        of_row = tl.arange(0, BLOCK_Q * GROUP)
        query, head = first + of_row // GROUP, kv_head * group + of_row % GROUP
        real = (query < lq) & (of_row % GROUP < group)
        dim, value_dim = tl.arange(0, SIZE), tl.arange(0, VALUE_SIZE)
        token = (start + query).to(tl.int64)
        q = tl.load(
            q_ptr + token[:, None] * stride_q_token + head[:, None] * stride_q_head + dim[None, :],
            mask=real[:, None] & (dim < size)[None, :],
            other=0.0,
        )
        if WIDEN:
            q = q.to(tl.float32)
        factor = scale
        if K_SCALE:
            factor *= tl.load(k_scale_ptr + kv_head)
        position = query + lk - lq
        # What some query of the block sees, cut into parts of whole blocks.
        stop = tl.minimum(lk, first + BLOCK_Q + lk - lq)
        begin = 0
        if WINDOW:
            begin = tl.maximum(0, first + lk - lq - window + 1)
        share = tl.cdiv(tl.cdiv(tl.maximum(stop - begin, 0), BLOCK_N), parts) * BLOCK_N
        begin += part * share
        stop = tl.minimum(stop, begin + share)
        best = tl.full((BLOCK_Q * GROUP,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_Q * GROUP,), dtype=tl.float32)
        mixed = tl.zeros((BLOCK_Q * GROUP, VALUE_SIZE), dtype=tl.float32)
        for at in range(begin, stop, BLOCK_N):
            key = at + tl.arange(0, BLOCK_N)
            known = key < stop
            block = tl.load(
                table_ptr + sequence * stride_table + key // page, mask=known, other=0
            ).to(tl.int64)
            k_row = block * stride_k_page + key % page * stride_k_row + kv_head * stride_k_head
            k = tl.load(
                k_ptr + k_row[None, :] + dim[:, None],
                mask=known[None, :] & (dim < size)[:, None],
                other=0.0,
            ).to(q.dtype)
            score = tl.dot(q, k, input_precision=PRECISION) * factor
            if SOFTCAP:
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
            seen = known[None, :] & (key[None, :] <= position[:, None])
            if WINDOW:
                seen &= key[None, :] > position[:, None] - window
            score = tl.where(seen, score, float("-inf"))
            new = tl.maximum(best, tl.max(score, axis=1))
            # Where nothing has been seen yet, -inf less -inf would be NaN.
            base = tl.where(new == float("-inf"), 0.0, new)
            p = tl.exp(score - base[:, None])
            kept = tl.exp(best - base)
            total = total * kept + tl.sum(p, axis=1)
            v_row = block * stride_v_page + key % page * stride_v_row + kv_head * stride_v_head
            v = tl.load(
                v_ptr + v_row[:, None] + value_dim[None, :],
                mask=known[:, None] & (value_dim < value_size)[None, :],
                other=0.0,
            ).to(q.dtype)
            mixed = mixed * kept[:, None]
            mixed = tl.dot(p.to(q.dtype), v, mixed, input_precision=PRECISION)
            best = new
        blind = total == 0.0
        mixed = mixed / tl.where(blind, 1.0, total)[:, None]
        if V_SCALE:
            mixed *= tl.load(v_scale_ptr + kv_head)
        row = (part * tokens + token) * heads + head
        at_out = out_ptr + row[:, None] * value_size + value_dim[None, :]
        mask = real[:, None] & (value_dim < value_size)[None, :]
        tl.store(at_out, mixed.to(out_ptr.dtype.element_ty), mask=mask)
        lse = tl.where(blind, float("-inf"), best + tl.log(tl.where(blind, 1.0, total)))
        tl.store(lse_ptr + row, lse, mask=real)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    block_table: Tensor,
    context_lengths: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `mcore_kernels.protocols.PagedAttentionOp`."""
    check_pages(q, key_cache, value_cache, block_table, context_lengths, cu_seqlens_q)
    out, lse = _call(
        q, key_cache, value_cache, block_table, context_lengths, cu_seqlens_q, max_seqlen_q, window,
        scale, softcap, sinks, key_scale, value_scale,
    )  # fmt: skip
    return out, lse


def _paged(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lengths: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    tokens, heads, size = q.shape
    sequences, value_size, kv_heads = len(context_lengths), value_cache.shape[3], key_cache.shape[2]
    group = heads // kv_heads
    padded = triton.next_power_of_2(group)
    # At least 16 rows for a matrix product; more when whole chunks of prompts come.
    block_q = max(16 // padded, min(triton.next_power_of_2(max(1, max_seqlen_q)), 64 // padded), 1)
    blocks_q = triton.cdiv(max_seqlen_q, block_q)
    parts = _parts(q, blocks_q * kv_heads * sequences, block_table.shape[1] * key_cache.shape[1])
    # Rows of no sequence are written by no program: they are zeros, and have seen nothing.
    dtype = q.dtype if parts == 1 else torch.float32
    out = q.new_zeros(parts, tokens, heads, value_size, dtype=dtype)
    lse = q.new_full((parts, tokens, heads), -torch.inf, dtype=torch.float32)
    q = q if q.stride(2) == 1 or size == 1 else q.contiguous()
    widen = interpreted(q)
    keys, keys_of_wide, warps, stages = tuned(
        "paged_attention", q.device, "keys", "keys_of_wide", "warps", "stages"
    )
    if tokens and sequences and max_seqlen_q:
        with on_device(q):
            _paged_kernel[(blocks_q, kv_heads * parts, sequences)](
                q, key_cache, value_cache, block_table, context_lengths, cu_seqlens_q,
                *(lse if one is None else one for one in (key_scale, value_scale)), out, lse,
                q.stride(0), q.stride(1), *key_cache.stride()[:3],
                *value_cache.stride()[:3], block_table.stride(0), group, key_cache.shape[1],
                parts, tokens, heads, size, value_size, size**-0.5 if scale is None else scale,
                window or 0, softcap or 1.0, WINDOW=window is not None,
                SOFTCAP=softcap is not None, K_SCALE=key_scale is not None,
                V_SCALE=value_scale is not None, WIDEN=widen,
                PRECISION="ieee" if widen or q.dtype == torch.float32 else "tf32",
                GROUP=padded, BLOCK_Q=block_q, BLOCK_N=keys if size <= 128 else keys_of_wide,
                SIZE=max(16, triton.next_power_of_2(size)),
                VALUE_SIZE=max(16, triton.next_power_of_2(value_size)), num_warps=warps,
                num_stages=stages,
            )  # fmt: skip
    if parts > 1:
        merged = lse.logsumexp(0)
        # A query that no part has seen a key for: exp(-inf less -inf) would be NaN.
        share = torch.where(lse == -torch.inf, 0.0, (lse - merged).exp())
        out, lse = (out * share.unsqueeze(-1)).sum(0).to(q.dtype), merged
    else:
        out, lse = out[0], lse[0]
    return (out, lse) if sinks is None else merge_sinks(out, lse, sinks)


_LIBRARY = OpLibrary()
_call = _LIBRARY.when_compiled(f"paged_attention{PAGED_CALL}", _paged, fake=paged_fake)


def _parts(q: Tensor, count: int, most_keys: int) -> int:
    """Into how many parts the keys are cut, so that `count` programs a part fill the device.

    Fewer keys than "part" are not worth a program of their own.
    """
    wanted = programs(q, per_processor=2) // max(1, count)
    (part,) = tuned("paged_attention", q.device, "part")
    return max(1, min(wanted, most_keys // part, 16))
