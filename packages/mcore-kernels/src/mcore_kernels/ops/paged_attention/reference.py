"""Attention over pages: the pages of each sequence are put together first.

Shapes: T new tokens, N sequences, P rows of a page, Q query heads, K kv heads, D and Dv head sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary
from mcore_kernels.ops.attention.reference import REFERENCE
from mcore_kernels.protocols import accumulation_dtype


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
    """See `mcore_kernels.protocols.PagedAttentionOp`; reads the lengths back."""
    check_pages(q, key_cache, value_cache, block_table, context_lengths, cu_seqlens_q)
    out, lse = _call(
        q, key_cache, value_cache, block_table, context_lengths, cu_seqlens_q, max_seqlen_q, window,
        scale, softcap, sinks, key_scale, value_scale,
    )  # fmt: skip
    return out, lse


def _paged(  # noqa: PLR0917 -- the arguments of the operator, in its order
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
    lengths = context_lengths.tolist()
    wide = accumulation_dtype(q.dtype)
    k = _together(key_cache, key_scale, block_table, lengths).to(wide)
    v = _together(value_cache, value_scale, block_table, lengths).to(wide)
    ends_k = torch.tensor([0, *lengths]).cumsum(0).to(cu_seqlens_q)
    with torch.no_grad():
        out, lse = REFERENCE(
            q.to(wide), k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=ends_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max(lengths, default=0), window=window,
            scale=scale, softcap=softcap, sinks=sinks,
        )  # fmt: skip
    return out.to(q.dtype), lse


def paged_fake(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    """Empty results of the shapes and dtypes of the operator's."""
    lse = q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))
    return q.new_empty(*q.shape[:2], value_cache.shape[3]), lse


PAGED_CALL = (
    "(Tensor q, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor context_lengths, "
    "Tensor cu_seqlens_q, SymInt max_seqlen_q, SymInt? window, float? scale, float? softcap, "
    "Tensor? sinks, Tensor? key_scale, Tensor? value_scale) -> (Tensor, Tensor)"
)
"""The operator's arguments by position, as torch writes them."""

_LIBRARY = OpLibrary()
_call = _LIBRARY.when_compiled(f"paged_attention_reference{PAGED_CALL}", _paged, fake=paged_fake)


def _together(
    cache: Tensor, factor: Tensor | None, block_table: Tensor, lengths: list[int]
) -> Tensor:
    """The rows [Σ lengths, K, D] of all sequences, in the accumulation dtype where scaled."""
    page = cache.shape[1]
    rows = []
    for pages, length in zip(block_table, lengths, strict=True):
        used = pages[: -(-length // page)].to(torch.int64)
        # One byte wide dtypes know no index_select; their bits do.
        bits = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
        rows.append(bits[used].flatten(0, 1)[:length].view(cache.dtype))
    if not rows:
        return cache.new_empty(0, *cache.shape[2:])
    together = torch.cat([one.float() if cache.dtype.itemsize == 1 else one for one in rows])
    if factor is None:
        return together
    return together.to(accumulation_dtype(factor.dtype)) * factor.unsqueeze(-1)


def check_pages(  # noqa: PLR0917 -- the tensors of the operator, in its order
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lengths: Tensor,
    cu_seqlens_q: Tensor,
) -> None:
    """ValueError unless the shapes fit together."""
    if key_cache.shape[:3] != value_cache.shape[:3] or key_cache.shape[3] != q.shape[2]:
        raise ValueError(
            f"paged_attention: q {list(q.shape)}, key_cache {list(key_cache.shape)} and "
            f"value_cache {list(value_cache.shape)} do not fit: [T, Q, D], [pages, P, K, D] and "
            "[pages, P, K, Dv]"
        )
    if q.shape[1] % key_cache.shape[2]:
        raise ValueError(
            f"paged_attention: the number of kv heads must divide that of query heads, got "
            f"{key_cache.shape[2]} and {q.shape[1]}"
        )
    count = cu_seqlens_q.shape[0] - 1
    if not block_table.shape[0] == context_lengths.shape[0] == count:
        raise ValueError(
            f"paged_attention: cu_seqlens_q has {count} sequences, block_table "
            f"{block_table.shape[0]} and context_lengths {context_lengths.shape[0]}"
        )
