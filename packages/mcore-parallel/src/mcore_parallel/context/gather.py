"""All-gather attention: every rank gets the keys and values that its queries see, and attends.

t rows of this rank, T = n · t of all n, K kv heads, D and Dv head sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mcore_parallel.collectives import all_gather, all_to_all, reduce_scatter
from mcore_parallel.context.blocks import Blocks, Call, Chunk, Masking, Merge, Scores, make_calls
from mcore_parallel.context.blockwise import BlockwiseAttention
from mcore_parallel.context.local import Documents, chunks_of, document_order, holders
from mcore_parallel.group import Group
from mcore_parallel.protocols import AttentionGradOp
from mcore_parallel.torch_attention import sinks_grad, with_sinks

__all__ = ["AllGatherAttention"]


class AllGatherAttention(BlockwiseAttention["_Plan"]):
    """`AttentionOp` over the zigzag shares of `SequenceSplit`, by gathering keys and values.

    Receives (n - 1) · t · K · (D + Dv) elements forward, before the computation; the backward
    gathers them again and sums their gradients at home in the accumulation dtype. Holds
    T · K · (D + Dv) elements while it computes, and nothing of it afterwards. Where a window shows
    a rank no more than half of all rows (on average over the ranks), only those are sent and held.

    The arguments are those of `BlockwiseAttention`.
    """

    @property
    def size(self) -> int:
        """The number of ranks that share the rows."""
        return self.group.size

    def plan(
        self,
        documents: Documents,
        lengths: Sequence[int],
        masking: Masking,
        rows: int,
        device: torch.device,
    ) -> _Plan:
        """See `BlockwiseAttention`."""
        group = self.group
        ends = list(zip(documents, lengths, strict=True))
        views = [_views(ends, masking, rank, group.size) for rank in range(group.size)]
        total = sum(len(view.keys) for each in views for view in each)
        keys: _Keys
        if 2 * total <= rows * group.size**2:
            keys = _Seen.of(views, rows, group, device)
            blocks = _meetings(views[group.rank])
            num_keys = sum(len(view.keys) for view in views[group.rank])
        else:
            order = document_order(documents, rows, group.size).to(device)
            keys = _All(group=group, order=order, inverse=order.argsort())
            blocks = _all_meetings(views[group.rank], masking, group.size)
            num_keys = rows * group.size
        calls = make_calls(blocks, masking, num_q=rows, num_k=num_keys, device=device)
        return _Plan(calls=calls, keys=keys)

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, plan: _Plan, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """See `BlockwiseAttention`."""
        result: tuple[Tensor, Tensor] = _Gathered.apply(*qkv, sinks, (plan, self.op, scores))  # type: ignore[no-untyped-call]
        return result


class _View(NamedTuple):
    """What one chunk of queries sees: positions of keys of its document, without a gap.

    length: of the whole document, without rows that were added.
    """

    document: range
    length: int
    queries: Chunk
    keys: range


def _views(
    documents: Sequence[tuple[range, int]], masking: Masking, rank: int, size: int
) -> list[_View]:
    """What the queries of `rank` see, chunk by chunk, of documents and their whole lengths."""
    causal, window = masking
    found = []
    for document, length in documents:
        for queries in chunks_of(document, rank, size, length):
            start, stop = queries.positions.start, queries.positions.stop
            first = 0 if window is None else max(0, start - window + 1)
            beyond = length if window is None else min(length, stop + window - 1)
            seen = range(first, stop if causal else beyond) if queries.positions else range(0)
            found.append(_View(document, length, queries, seen))
    return found


class _Keys(Protocol):
    """The rows of keys and values that this rank attends to, flat: [rows, K · (D + Dv)]."""

    def gather(self, mine: Tensor) -> Tensor:
        """Return these rows, given my own [t, …]."""
        ...

    def home(self, grads: Tensor) -> Tensor:
        """Return the sums of my own rows' gradients [t, …], given mine of these rows."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class _Plan:
    """The calls over the keys that are gathered, and how to bring them here and back."""

    calls: tuple[Call, ...]
    keys: _Keys


@dataclass(frozen=True, kw_only=True, eq=False)
class _All:
    """All rows of all ranks, in the order of the documents."""

    group: Group
    order: Tensor
    inverse: Tensor

    def gather(self, mine: Tensor) -> Tensor:
        return all_gather(mine, self.group).index_select(0, self.order)

    def home(self, grads: Tensor) -> Tensor:
        return reduce_scatter(grads.index_select(0, self.inverse), self.group)


def _all_meetings(views: Sequence[_View], masking: Masking, size: int) -> Blocks:
    """The keys up to the end of each chunk of queries, and those after it."""
    found = []
    if not masking.causal and masking.window is None:  # the chunks of a document see the same
        for early, late in zip(views[::2], views[1::2], strict=True):
            count = len(early.queries.positions) + len(late.queries.positions)
            mine = Chunk(range(count), early.document.start)
            found.append(([mine], [Chunk(range(early.length), early.document.start * size)]))
        return found
    for view in views:
        start, end = view.document.start * size, view.queries.positions.stop
        after = Chunk(range(end, view.length), start + end)
        found.append(([view.queries], [Chunk(range(end), start), after]))
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class _Seen:
    """The rows that this rank's queries see, one view after another.

    sent: my rows that go to the ranks, one rank after another, `give[r]` of them to rank r.
    order: where each of these rows is among those that come, `take[r]` of them from rank r;
    inverse: the way back. rows: t.
    """

    group: Group
    sent: Tensor
    give: list[int]
    take: list[int]
    order: Tensor
    inverse: Tensor
    rows: int

    @staticmethod
    def of(
        views: Sequence[Sequence[_View]], rows: int, group: Group, device: torch.device
    ) -> _Seen:
        held = [_held(each, group.size) for each in views]
        sent = [rows_there[holder == group.rank] for holder, rows_there in held]
        mine, _ = held[group.rank]
        inverse = mine.argsort(stable=True)
        return _Seen(
            group=group,
            sent=torch.cat(sent).to(device),
            give=[len(part) for part in sent],
            take=mine.bincount(minlength=group.size).tolist(),
            order=inverse.argsort().to(device),
            inverse=inverse.to(device),
            rows=rows,
        )

    def gather(self, mine: Tensor) -> Tensor:
        rows = all_to_all(mine.index_select(0, self.sent), self.group, self.take, self.give)
        return rows.index_select(0, self.order)

    def home(self, grads: Tensor) -> Tensor:
        rows = grads.index_select(0, self.inverse)
        rows = all_to_all(rows, self.group, self.give, self.take)
        return grads.new_zeros(self.rows, grads.shape[1]).index_add_(0, self.sent, rows)


def _held(views: Sequence[_View], size: int) -> tuple[Tensor, Tensor]:
    """Which rank holds each key of the views, and in which of its rows."""
    pairs = [holders(view.document, view.keys, size) for view in views if view.keys]
    ranks, rows = zip(*pairs, strict=True) if pairs else ((), ())
    none = torch.empty(0, dtype=torch.int64)
    return torch.cat((none, *ranks)), torch.cat((none, *rows))


def _meetings(views: Sequence[_View]) -> Blocks:
    """The same of rows that stand one view after another."""
    found, row = [], 0
    for view in views:
        keys, end = Chunk(view.keys, row), view.queries.positions.stop
        parts = range(view.keys.start, end), range(end, view.keys.stop)
        found.append(
            ([view.queries], [Chunk(part, keys.rows(part).start) for part in parts if part])
        )
        row += len(view.keys)
    return found


_How = tuple[_Plan, AttentionGradOp, Scores]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 -- autograd passes by position
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, how: _How
    ) -> tuple[Tensor, Tensor]:
        plan, op, scores = how
        merge = Merge(q, v)
        keys = _gather(k, v, plan.keys)
        for call in plan.calls:
            merge.add(call.q_rows, *call.forward(op, q, *keys, scores))
        wide, lse = merge.out, merge.lse
        if sinks is not None:
            wide, lse = with_sinks(wide, lse, sinks)
        out = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.how = how
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        plan, op, scores = ctx.how
        keys = _gather(k, v, plan.keys)
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, *keys))
        of_out = grads[0].contiguous(), out, lse
        for call in plan.calls:
            call.backward(op, (q, *keys), of_out, (dq, dk, dv), scores)
        both = plan.keys.home(torch.cat([dk.flatten(1), dv.flatten(1)], 1))
        width = k.flatten(1).shape[1]
        dk, dv = both[:, :width].reshape(k.shape), both[:, width:].reshape(v.shape)
        d_sinks = None if sinks is None else sinks_grad(of_out[0], out, lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None


def _gather(k: Tensor, v: Tensor, keys: _Keys) -> tuple[Tensor, Tensor]:
    """Keys and values that this rank attends to, [rows, K, …] each."""
    both = keys.gather(torch.cat([k.flatten(1), v.flatten(1)], 1))
    width = k.flatten(1).shape[1]
    return (
        both[:, :width].reshape(-1, *k.shape[1:]),
        both[:, width:].reshape(-1, *v.shape[1:]),
    )
