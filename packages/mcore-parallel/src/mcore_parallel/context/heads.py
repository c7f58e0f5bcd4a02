"""Rows of some heads are exchanged for some rows of all heads, and back: attention, and the means.

Jacobs et al., "DeepSpeed Ulysses", 2023. n ranks of a group that hold neighbouring chunks exchange;
each then has Q / n heads of all their rows, which are a larger share of the same zigzag split.

t rows of this rank, Q query heads, K kv heads, D and Dv head sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.collectives import exchange
from mcore_parallel.context.blockwise import BlockwiseAttention
from mcore_parallel.context.kinds import check_heads
from mcore_parallel.context.local import (
    LastPlan,
    document_order,
    local_documents,
    whole_lengths,
)
from mcore_parallel.group import Group
from mcore_parallel.protocols import AttentionOp, TorchAttention

__all__ = ["AllToAllAttention", "HeadExchange", "WideRows"]


@dataclass(frozen=True, kw_only=True, eq=False)
class WideRows:
    """The rows of all ranks of an exchange: their order, and the bounds of their documents.

    order [n · t]: where they are among the ranks' rows, one rank after another; inverse: the way
    back. Rows that were added to share documents may be left out (`HeadExchange.widen`): order is
    then shorter, and inverse None. cu_seqlens, max_seqlen, uniform: as `AttentionOp` takes them.
    """

    order: Tensor
    inverse: Tensor | None
    num_rows: int
    cu_seqlens: Tensor
    max_seqlen: int
    uniform: tuple[int, int] | None


class HeadExchange:
    """Lets a layer that mixes tokens see whole documents, for its share of the heads.

    For layers over the zigzag shares of `SequenceSplit`, whose heads do not mix. The rows past the
    last document come last. Everything is differentiable.

    group: who exchanges, neighbours in the split.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._plans: LastPlan[WideRows] = LastPlan()

    def widen(
        self,
        cu_seqlens: tuple[Tensor, Tensor],
        uniform: tuple[int, int] | None,
        rows: tuple[int, int],
        device: torch.device,
        *,
        lengths: tuple[int, ...] | None = None,
    ) -> WideRows:
        """Return what the exchanged rows are, from the bounds and numbers of this rank's.

        cu_seqlens, rows: those of queries and of keys. lengths: of the whole documents, which all
        ranks that share them exchange, where later rows are to be left out; those give zeros on
        the way back. Reads the bounds from the device, unless `uniform` or for a batch that was
        asked about last.
        """
        size = self.group.size

        def make() -> WideRows:
            documents = local_documents(cu_seqlens, uniform, rows)
            order = document_order(documents, rows[0], size)
            room = whole_lengths(documents, size, None)
            ends = whole_lengths(documents, size, lengths)
            if ends == room:
                inverse, bounds = order.argsort().to(device), cu_seqlens[0] * size
            else:
                starts = [document.start * size for document in documents]
                kept = [order[a : a + n] for a, n in zip(starts, ends, strict=True)]
                order, inverse = torch.cat(kept), None
                bounds = torch.tensor([0, *accumulate(ends)], device=device)
            return WideRows(
                order=order.to(device),
                inverse=inverse,
                num_rows=rows[0] * size,
                cu_seqlens=bounds.to(torch.int32),
                max_seqlen=max(ends, default=0),
                uniform=_uniform(ends, len(order)),
            )

        return self._plans.get(cu_seqlens, uniform, (rows, device, lengths), make)

    def to_heads(self, parts: Sequence[Tensor], wide: WideRows) -> list[Tensor]:
        """Give the other ranks their heads of my rows; return my heads of all rows, in order.

        Each part [t, heads, D] becomes [n · t, heads / n, D]. With fewer heads than ranks each goes
        to the n / heads ranks that share it, and its gradients are summed.
        """
        dealt = [_dealt(x, self.group.size) for x in parts]
        shapes = [part.shape[2:] for part in dealt]
        sent = torch.cat([part.flatten(2) for part in dealt], 2)
        rows = exchange(sent.flatten(0, 1), self.group).index_select(0, wide.order)
        split = torch.split(rows, [shape.numel() for shape in shapes], dim=1)
        return [part.reshape(-1, *shape) for part, shape in zip(split, shapes, strict=True)]

    def to_rows(self, x: Tensor, wide: WideRows) -> Tensor:
        """Return all heads of my rows: [n · t, heads / n, …] to [t, heads, …]."""
        size, flat = self.group.size, x.flatten(1)
        if wide.inverse is None:
            flat = x.new_zeros(wide.num_rows, flat.shape[1]).index_copy(0, wide.order, flat)
        else:
            flat = flat.index_select(0, wide.inverse)
        rows = exchange(flat, self.group)
        return rows.view(size, wide.num_rows // size, *x.shape[1:]).transpose(0, 1).flatten(1, 2)

    def my_heads(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the slice of `x` for the heads that `to_heads` gives me, as a view.

        For parameters, of which `dim` counts heads: fewer than ranks are shared in the same way.
        """
        heads, size = x.shape[dim], self.group.size
        return x.narrow(dim, self.group.rank * heads // size, max(1, heads // size))


class AllToAllAttention:
    """`AttentionOp` over the zigzag shares of `SequenceSplit`, by exchanging heads for rows.

    q, k, v are this rank's rows, the bounds those of its documents (`local_bounds`), the same on
    all ranks. Sends (n - 1) / n of its q, k and v, and gets as much; the same for the output and
    its log-sum-exp, and once more for each (but the last) in the backward. With fewer kv heads than
    ranks each is sent to the n / K ranks whose queries read it, and its gradients are summed.

    group: who exchanges. op: the attention of all rows of the group; default plain torch. Where the
    group is a part of those who share the sequence (neighbours, as `Group.split` makes them), it is
    an `AttentionOp` over the shares of the parts.

    Raises:
        ValueError: when called with heads that the ranks cannot share, see `check_heads`.
    """

    def __init__(self, group: Group, op: AttentionOp | None = None) -> None:
        self.group = group
        self.op: AttentionOp = TorchAttention() if op is None else op
        self._exchange = HeadExchange(group)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        uniform: tuple[int, int] | None = None,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        lengths: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `ContextAttentionOp`. All ranks of the group call it together, backward included."""
        size, bounds, longest = self.group.size, (cu_seqlens_q, cu_seqlens_k), max_seqlen_q
        check_heads(q.shape[1], k.shape[1], size)
        ends = None if causal else lengths  # a causal mask hides what is added
        further: dict[str, Any] = {}
        if isinstance(self.op, BlockwiseAttention) and self.op.size > 1:  # what comes is shares
            further["lengths"], ends = ends, None
        wide = None
        if size > 1:
            rows = q.shape[0], k.shape[0]
            wide = self._exchange.widen(bounds, uniform, rows, q.device, lengths=ends)
            q, k, v = self._exchange.to_heads((q, k, v), wide)
            sinks = None if sinks is None else self._exchange.my_heads(sinks)
            bounds, uniform = (wide.cu_seqlens, wide.cu_seqlens), wide.uniform
            longest = max_seqlen_k = wide.max_seqlen
        out, lse = self.op(
            q,
            k,
            v,
            cu_seqlens_q=bounds[0],
            cu_seqlens_k=bounds[1],
            max_seqlen_q=longest,
            max_seqlen_k=max_seqlen_k,
            uniform=uniform,
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            **further,
        )
        if wide is None:
            return out, lse
        lse = self._exchange.to_rows(lse.detach().unsqueeze(-1), wide).squeeze(-1)
        return self._exchange.to_rows(out, wide), lse


def _uniform(lengths: Sequence[int], num_rows: int) -> tuple[int, int] | None:
    """What `AttentionOp` calls uniform, of documents of these lengths in so many rows."""
    if not num_rows or len(set(lengths)) != 1 or sum(lengths) != num_rows:
        return None
    return len(lengths), lengths[0]


def _dealt(x: Tensor, size: int) -> Tensor:
    """[t, heads, D] to [n, t, heads per rank, D]; a head for several ranks is repeated."""
    rows, heads, width = x.shape
    if heads < size:
        # expand, so that the gradients of the copies are summed in one reduction
        x = x.unsqueeze(2).expand(rows, heads, size // heads, width).flatten(1, 2)
    return x.reshape(rows, size, x.shape[1] // size, width).transpose(0, 1)
