"""All-gather attention: every rank gets all keys and values, and attends with its own queries.

t rows of this rank, T = n · t of all n, K kv heads, D and Dv head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.collectives import all_gather, reduce_scatter
from mcore_parallel.context.blocks import Blocks, Call, Chunk, Masking, Merge, make_calls
from mcore_parallel.context.local import (
    Documents,
    LastPlan,
    chunks_of,
    document_order,
    local_documents,
)
from mcore_parallel.group import Group
from mcore_parallel.protocols import AttentionGradOp, TorchAttention

__all__ = ["AllGatherAttention"]


class AllGatherAttention:
    """`AttentionOp` over the zigzag shares of `SequenceSplit`, by gathering keys and values.

    q, k, v are this rank's rows, the bounds those of its documents (`local_bounds`), the same on
    all ranks. Receives (n - 1) · t · K · (D + Dv) elements forward, before the computation; the
    backward gathers them again and reduce-scatters their gradients in the accumulation dtype.
    Holds T · K · (D + Dv) elements while it computes, and nothing of it afterwards.

    group: who shares the sequence. op: the attention that is called; default plain torch.
    """

    def __init__(self, group: Group, op: AttentionGradOp | None = None) -> None:
        self.group = group
        self.op: AttentionGradOp = TorchAttention() if op is None else op
        self._plans: LastPlan[_Plan] = LastPlan()

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
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionOp`. All ranks of the group call it together, backward included."""
        if self.group.size == 1:
            return self.op(
                q,
                k,
                v,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k,
                max_seqlen_q=max_seqlen_q,
                max_seqlen_k=max_seqlen_k,
                uniform=uniform,
                causal=causal,
                window=window,
                scale=scale,
            )
        masking, bounds = Masking(causal, window), (cu_seqlens_q, cu_seqlens_k)
        rows = q.shape[0], k.shape[0]
        factor = q.shape[-1] ** -0.5 if scale is None else scale

        def make() -> _Plan:
            masking.check()
            documents = local_documents(bounds, uniform, rows)
            order = document_order(documents, rows[0], self.group.size)
            return _Plan(
                calls=_calls(documents, masking, rows[0], self.group, q.device),
                op=self.op,
                scale=factor,
                group=self.group,
                order=order.to(q.device),
                inverse=order.argsort().to(q.device),
            )

        plan = self._plans.get(bounds, uniform, (masking, rows, factor, q.device), make)
        result: tuple[Tensor, Tensor] = _Gathered.apply(q, k, v, plan)  # type: ignore[no-untyped-call]
        return result


@dataclass(frozen=True, kw_only=True, eq=False)
class _Plan:
    """The calls over all keys in document order, and how to bring them there and back."""

    calls: tuple[Call, ...]
    op: AttentionGradOp
    scale: float
    group: Group
    order: Tensor
    inverse: Tensor


def _calls(
    documents: Documents, masking: Masking, rows: int, group: Group, device: torch.device
) -> tuple[Call, ...]:
    blocks: Blocks = [
        meeting for document in documents for meeting in _meetings(document, group, masking)
    ]
    return make_calls(blocks, masking, num_q=rows, num_k=rows * group.size, device=device)


def _meetings(document: range, group: Group, masking: Masking) -> Blocks:
    """What each of my chunks of a document sees: the keys up to its end, and those after it."""
    size, start = group.size, document.start * group.size
    if not masking.causal and masking.window is None:
        everything = range(len(document) * size)
        mine = Chunk(range(everything.stop - len(document), everything.stop), document.start)
        return [([mine], [Chunk(everything, start)])]
    found = []
    for mine in chunks_of(document, group.rank, size):
        end = mine.positions.stop
        before = Chunk(range(end), start)
        after = Chunk(range(end, len(document) * size), start + end)
        found.append(([mine], [before, after]))
    return found


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
        merge = Merge(q, v)
        everything = _gather(k, v, plan)
        for call in plan.calls:
            merge.add(call.q_rows, *call.forward(plan.op, q, *everything, plan.scale))
        out = merge.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merge.lse)
        ctx.plan = plan
        ctx.mark_non_differentiable(merge.lse)
        return out, merge.lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan: _Plan = ctx.plan
        everything = _gather(k, v, plan)
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, *everything))
        of_out = grads[0].contiguous(), out, lse
        for call in plan.calls:
            call.backward(plan.op, (q, *everything), of_out, (dq, dk, dv), plan.scale)
        both = torch.cat([dk.flatten(1), dv.flatten(1)], 1).index_select(0, plan.inverse)
        both = reduce_scatter(both, plan.group)
        width = dk.flatten(1).shape[1]
        dk, dv = both[:, :width].reshape(k.shape), both[:, width:].reshape(v.shape)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _gather(k: Tensor, v: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranks in the order of the documents, [T, K, …] each."""
    both = all_gather(torch.cat([k.flatten(1), v.flatten(1)], 1), plan.group)
    both = both.index_select(0, plan.order)
    width = k.flatten(1).shape[1]
    return (
        both[:, :width].reshape(-1, *k.shape[1:]),
        both[:, width:].reshape(-1, *v.shape[1:]),
    )
