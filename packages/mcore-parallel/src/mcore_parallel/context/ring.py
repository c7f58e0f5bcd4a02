"""Ring attention: keys and values travel from rank to rank while queries stay.

Liu et al., "Ring Attention with Blockwise Transformers", 2023. Partial outputs are joined by their
log-sum-exp. In the backward keys and values travel again, and their gradients with them, one block
behind, until they are home.

Through a window a rank sees the blocks of its nearest neighbours only. Those come straight from
there, and their gradients go straight back.

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
from mcore_parallel.context.blocks import Blocks, Call, Chunk, Masking, Merge, Scores, make_calls
from mcore_parallel.context.blockwise import BlockwiseAttention
from mcore_parallel.context.local import Documents, chunks_of, real_rows
from mcore_parallel.faults import GuardedWork, guarded
from mcore_parallel.group import Group
from mcore_parallel.protocols import AttentionGradOp
from mcore_parallel.torch_attention import sinks_grad, with_sinks

__all__ = ["RingAttention"]


class RingAttention(BlockwiseAttention["_Plan"]):
    """`AttentionOp` over the zigzag shares of `SequenceSplit`, by a ring of sends.

    The next block of keys and values is under way while one is computed. Sends
    (m - 1) · t · K · (D + Dv) elements forward, with m ranks; backward as much again, and
    m · t · K · (D + Dv) of gradients in the accumulation dtype. With a window that reaches less
    than half way round, blocks out of reach are neither sent nor computed: with a reach of h ranks
    it is 2 · h instead of m - 1 and m.

    group, op: those of `BlockwiseAttention`. stride: the ring goes over every stride-th member,
    those with my remainder, for `two-level`.
    """

    def __init__(self, group: Group, op: AttentionGradOp | None = None, *, stride: int = 1) -> None:
        if stride < 1 or group.size % stride:
            raise ValueError(
                f"ring attention: {group.size} ranks have no rings over every {stride}th of them"
            )
        super().__init__(group, op)
        self.members: tuple[int, ...] = tuple(range(group.rank % stride, group.size, stride))

    @property
    def size(self) -> int:
        """The number of ranks of the ring."""
        return len(self.members)

    def plan(
        self,
        documents: Documents,
        lengths: Sequence[int],
        masking: Masking,
        rows: int,
        device: torch.device,
    ) -> _Plan:
        """See `BlockwiseAttention`."""
        size, mine = self.size, self.members.index(self.group.rank)

        def calls(theirs: int) -> tuple[Call, ...]:
            blocks: Blocks = [
                _meeting(document, length, (mine, theirs, size), masking)
                for document, length in zip(documents, lengths, strict=True)
            ]
            return make_calls(blocks, masking, num_q=rows, num_k=rows, device=device)

        def member(place: int) -> int | None:
            return self.members[place] if 0 <= place < size else None

        reach = _reach(documents, masking, size)
        if 2 * reach >= size - 1:
            after, before = self.members[(mine + 1) % size], self.members[mine - 1]
            steps = [
                _Step(calls=calls((mine - step) % size), give=after, take=before)
                for step in range(size)
            ]
            return _Plan(steps=steps, group=self.group, passed_on=True)
        steps = [_Step(calls=calls(mine), give=None, take=None)]
        for distance in range(1, reach + 1):
            for away in (distance, -distance):
                give, take = member(mine + away), member(mine - away)
                seen = () if take is None else calls(mine - away)
                steps.append(_Step(calls=seen, give=give, take=take))
        return _Plan(steps=steps, group=self.group, passed_on=False)

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, plan: _Plan, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """See `BlockwiseAttention`."""
        result: tuple[Tensor, Tensor] = _Ring.apply(*qkv, sinks, (plan, self.op, scores))  # type: ignore[no-untyped-call]
        return result


def _reach(documents: Documents, masking: Masking, size: int) -> int:
    """How many ranks away the farthest key is that a query sees.

    Neighbouring chunks of a document lie on the same or on neighbouring ranks.
    """
    if masking.window is None:
        return size
    chunks = [len(document) // 2 for document in documents if document]
    return min(size, -(-(masking.window - 1) // min(chunks))) if chunks else 0


def _meeting(
    document: range, whole: int, ranks: tuple[int, int, int], masking: Masking
) -> tuple[Sequence[Chunk], Sequence[Chunk]]:
    """The chunks of one document that my rank and the keys of another bring together.

    whole: the length of the whole document. ranks: mine, theirs, and how many there are.
    """
    mine, theirs, size = ranks
    queries = chunks_of(document, mine, size, whole)
    keys = chunks_of(document, theirs, size, whole)
    if masking.window is not None:
        return queries, keys
    # Without a window only the order of chunks matters, and neighbours in rows are one chunk.
    length = len(document)
    if not masking.causal:
        counts = (len(real_rows(document, rank, size, whole)) for rank in (mine, theirs))
        q, k = (Chunk(range(count), document.start) for count in counts)
        return [q], [k]
    both = Chunk(range(length), document.start)
    if mine == theirs:
        return [both], [both]
    if theirs < mine:  # my chunks lie after their first and before their last
        return [Chunk(range(length, 2 * length), document.start)], [
            Chunk(range(length // 2), document.start)
        ]
    return [Chunk(range(length, length + length // 2), document.start + length // 2)], [both]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    """The calls for one block of keys, which comes from member `take` of the group.

    give: the member that gets one from me meanwhile. None: nobody.
    """

    calls: tuple[Call, ...]
    give: int | None
    take: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Plan:
    """The blocks in the order in which they are computed, mine first.

    passed_on: all come round the ring. Otherwise each comes from the rank that holds it.
    """

    steps: Sequence[_Step]
    group: Group
    passed_on: bool

    def swap(self, x: Tensor, out: Tensor, give: int | None, take: int | None) -> Sequence[Work]:
        """Start sending `x` to member `give` and receiving into `out` from member `take`."""
        pg, ranks = self.group.process_group, self.group.ranks
        operations = []
        if give is not None:
            operations.append(dist.P2POp(dist.isend, _torch.bits(x), ranks[give], pg))
        if take is not None:
            operations.append(dist.P2POp(dist.irecv, _torch.bits(out), ranks[take], pg))
        if not operations:
            return ()
        with guarded("ring attention", self.group):
            works = dist.batch_isend_irecv(operations)
        return [GuardedWork(work, "ring attention", self.group) for work in works]


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


class _Blocks:
    """Flat keys and values: the block that is computed, and the one that comes meanwhile."""

    def __init__(self, k: Tensor, v: Tensor, plan: _Plan) -> None:
        self._shapes = k.shape, v.shape
        self._mine = torch.cat([k.reshape(-1), v.reshape(-1)])
        self._here, self._next = self._mine, torch.empty_like(self._mine)
        self._plan = plan
        self._works: Sequence[Work] = ()

    def parts(self) -> tuple[Tensor, Tensor]:
        """Views of the block that is here, as keys and as values."""
        return _split(self._here, self._shapes)

    def depart(self, step: int) -> None:
        """Start bringing the block of `step`; the one before may be read until `arrive`."""
        sent = self._here if self._plan.passed_on else self._mine
        coming = self._plan.steps[step]
        self._works = self._plan.swap(sent, self._next, coming.give, coming.take)

    def arrive(self) -> None:
        """Wait for the block that comes."""
        _wait(self._works)
        free = self._here
        if free is self._mine and not self._plan.passed_on:
            free = torch.empty_like(self._mine)  # mine goes to others, too
        self._here, self._next = self._next, free


class _PassedOn:
    """Gradients that follow their block round the ring, each rank adding its share."""

    def __init__(self, blank: Tensor, plan: _Plan) -> None:
        self._sum, self._next = torch.zeros_like(blank), torch.empty_like(blank)
        self._plan = plan
        self._works: Sequence[Work] = ()

    def add(self, step: int, share: Tensor) -> None:
        """Add my share for the block of `step` to those that have come, and start passing it on."""
        if step:
            self._arrive()
        self._sum.add_(share)
        last = self._plan.steps[step]
        self._works = self._plan.swap(self._sum, self._next, last.give, last.take)

    def home(self) -> Tensor:
        """Wait for the sum that has come all the way round: that of my block."""
        self._arrive()
        return self._sum

    def _arrive(self) -> None:
        _wait(self._works)
        self._sum, self._next = self._next, self._sum


class _SentBack:
    """Gradients of a block that go straight back to the rank that holds it."""

    def __init__(self, blank: Tensor, plan: _Plan) -> None:
        self._sum, self._next = torch.zeros_like(blank), torch.empty_like(blank)
        self._plan = plan
        self._works: Sequence[Work] = ()
        self._sent = blank  # alive until it has gone
        self._takes = False

    def add(self, step: int, share: Tensor) -> None:
        """Start sending back my share for the block of `step`, and taking one for mine."""
        if step == 0:
            self._sum.add_(share)
            return
        self._arrive()
        came = self._plan.steps[step]
        self._sent, self._takes = share, came.give is not None
        self._works = self._plan.swap(share, self._next, came.take, came.give)

    def home(self) -> Tensor:
        """Wait for the last share of my block, and return the sum of all."""
        self._arrive()
        return self._sum

    def _arrive(self) -> None:
        _wait(self._works)
        if self._takes:
            self._sum.add_(self._next)


def _split(flat: Tensor, shapes: tuple[torch.Size, torch.Size]) -> tuple[Tensor, Tensor]:
    of_k, of_v = shapes
    return flat[: of_k.numel()].view(of_k), flat[of_k.numel() :].view(of_v)


_How = tuple[_Plan, AttentionGradOp, Scores]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 -- autograd passes by position
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, how: _How
    ) -> tuple[Tensor, Tensor]:
        plan, op, scores = how
        merge, block = Merge(q, v), _Blocks(k, v, plan)
        last = len(plan.steps) - 1
        for number, step in enumerate(plan.steps):
            if number < last:
                block.depart(number + 1)
            for call in step.calls:
                merge.add(call.q_rows, *call.forward(op, q, *block.parts(), scores))
            if number < last:
                block.arrive()
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
        of_out = grads[0].contiguous(), out, lse
        dq = torch.zeros_like(q, dtype=lse.dtype)
        block, shapes = _Blocks(k, v, plan), (k.shape, v.shape)
        blank = lse.new_empty(k.numel() + v.numel())
        sums = _PassedOn(blank, plan) if plan.passed_on else _SentBack(blank, plan)
        last = len(plan.steps) - 1
        for number, step in enumerate(plan.steps):
            if number < last:
                block.depart(number + 1)
            # Gradients travel while this block is computed.
            share = torch.zeros_like(blank)
            into = (dq, *_split(share, shapes))
            for call in step.calls:
                call.backward(op, (q, *block.parts()), of_out, into, scores)
            sums.add(number, share)
            if number < last:
                block.arrive()
        dk, dv = _split(sums.home(), shapes)
        d_sinks = None if sinks is None else sinks_grad(of_out[0], out, lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None
