"""Ring attention: keys and values travel from rank to rank while queries stay.

Liu et al., "Ring Attention with Blockwise Transformers", 2023. Partial outputs are joined by their
log-sum-exp. In the backward keys and values travel again, and their gradients with them, one block
behind, until they are home.

t rows of this rank, Q query heads, K kv heads, D and Dv head sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel import _torch
from mcore_parallel.collectives import Work
from mcore_parallel.context.blocks import Blocks, Call, Chunk, Masking, Merge, make_calls
from mcore_parallel.context.local import Documents, LastPlan, chunks_of, local_documents
from mcore_parallel.group import Group
from mcore_parallel.protocols import AttentionGradOp, TorchAttention

__all__ = ["RingAttention"]


class RingAttention:
    """`AttentionOp` over the zigzag shares of `SequenceSplit`, by a ring of sends.

    q, k, v are this rank's rows, the bounds those of its documents (`local_bounds`), the same on
    all ranks. The next block of keys and values is under way while one is computed. Sends
    (m - 1) · t · K · (D + Dv) elements forward, with m ranks; backward as much again, and
    m · t · K · (D + Dv) of gradients in the accumulation dtype.

    group: who shares the sequence. op: the attention of one block; default plain torch. stride: the
    ring goes over every stride-th member, those with my remainder, for `two-level`.
    """

    def __init__(self, group: Group, op: AttentionGradOp | None = None, *, stride: int = 1) -> None:
        if stride < 1 or group.size % stride:
            raise ValueError(
                f"ring attention: {group.size} ranks have no rings over every {stride}th of them"
            )
        self.group = group
        self.op: AttentionGradOp = TorchAttention() if op is None else op
        self.members: tuple[int, ...] = tuple(range(group.rank % stride, group.size, stride))
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
        """See `AttentionOp`. All ranks of the ring call it together, backward included."""
        if len(self.members) == 1:
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
            size, mine = len(self.members), self.members.index(self.group.rank)
            return _Plan(
                calls=self._calls(documents, masking, rows[0], q.device),
                op=self.op,
                scale=factor,
                group=self.group,
                after=self.members[(mine + 1) % size],
                before=self.members[(mine - 1) % size],
            )

        plan = self._plans.get(bounds, uniform, (masking, rows, factor, q.device), make)
        result: tuple[Tensor, Tensor] = _Ring.apply(q, k, v, plan)  # type: ignore[no-untyped-call]
        return result

    def _calls(
        self, documents: Documents, masking: Masking, rows: int, device: torch.device
    ) -> list[tuple[Call, ...]]:
        size, mine = len(self.members), self.members.index(self.group.rank)
        calls = []
        for step in range(size):
            theirs = (mine - step) % size
            blocks: Blocks = [
                _meeting(document, mine, theirs, size, masking) for document in documents
            ]
            calls.append(make_calls(blocks, masking, num_q=rows, num_k=rows, device=device))
        return calls


def _meeting(
    document: range, mine: int, theirs: int, size: int, masking: Masking
) -> tuple[Sequence[Chunk], Sequence[Chunk]]:
    """The chunks of one document that rank `mine` and the keys of rank `theirs` bring together."""
    queries = chunks_of(document, mine, size)
    keys = chunks_of(document, theirs, size)
    if masking.window is not None:
        return queries, keys
    # Without a window only the order of chunks matters, and neighbours in rows are one chunk.
    length = len(document)
    both = Chunk(range(length), document.start)
    if mine == theirs or not masking.causal:
        return [both], [both]
    if theirs < mine:  # my chunks lie after their first and before their last
        return [Chunk(range(length, 2 * length), document.start)], [
            Chunk(range(length // 2), document.start)
        ]
    return [Chunk(range(length, length + length // 2), document.start + length // 2)], [both]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Plan:
    """The calls for the keys of each step (step s: those of the rank s places before me)."""

    calls: list[tuple[Call, ...]]
    op: AttentionGradOp
    scale: float
    group: Group
    after: int
    before: int

    def shift(self, x: Tensor, out: Tensor) -> Sequence[Work]:
        """Start sending `x` to the rank after me and receiving into `out` from the one before."""
        pg, ranks = self.group.process_group, self.group.ranks
        operations = [
            dist.P2POp(dist.isend, _torch.bits(x), ranks[self.after], pg),
            dist.P2POp(dist.irecv, _torch.bits(out), ranks[self.before], pg),
        ]
        works: Sequence[Work] = dist.batch_isend_irecv(operations)
        return works


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


class _Travelling:
    """A flat buffer with one block of keys and values, and the one that replaces it."""

    def __init__(self, k: Tensor, v: Tensor, plan: _Plan) -> None:
        self._shapes = k.shape, v.shape
        self._here = torch.cat([k.reshape(-1), v.reshape(-1)])
        self._next = torch.empty_like(self._here)
        self._plan = plan
        self._works: Sequence[Work] = []

    def parts(self) -> tuple[Tensor, Tensor]:
        """Views of the block that is here, as keys and as values."""
        of_k, of_v = self._shapes
        return self._here[: of_k.numel()].view(of_k), self._here[of_k.numel() :].view(of_v)

    def depart(self) -> None:
        """Start passing the block on; it may be read until `arrive`."""
        self._works = self._plan.shift(self._here, self._next)

    def arrive(self) -> None:
        """Wait for the block that comes in its place."""
        _wait(self._works)
        self._here, self._next = self._next, self._here


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
        merge, block = Merge(q, v), _Travelling(k, v, plan)
        last = len(plan.calls) - 1
        for step, calls in enumerate(plan.calls):
            if step < last:
                block.depart()
            for call in calls:
                merge.add(call.q_rows, *call.forward(plan.op, q, *block.parts(), plan.scale))
            if step < last:
                block.arrive()
        out = merge.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merge.lse)
        ctx.plan = plan
        ctx.mark_non_differentiable(merge.lse)
        return out, merge.lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan: _Plan = ctx.plan
        of_out = grads[0].contiguous(), out, lse
        dq = torch.zeros_like(q, dtype=lse.dtype)
        block = _Travelling(k, v, plan)
        zeros = torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
        sums = _Travelling(*zeros, plan)
        last = len(plan.calls) - 1
        for step, calls in enumerate(plan.calls):
            if step < last:
                block.depart()
            # The gradients of this block arrive while it is computed, and then take mine along.
            dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
            for call in calls:
                call.backward(plan.op, (q, *block.parts()), of_out, (dq, dk, dv), plan.scale)
            if step:
                sums.arrive()
            for total, share in zip(sums.parts(), (dk, dv), strict=True):
                total.add_(share)
            sums.depart()
            if step < last:
                block.arrive()
        sums.arrive()
        dk, dv = sums.parts()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None
