"""Attention over packed segments, given attention over a batch of equally long ones.

Shapes: T tokens, N segments, B segments of one length, lq and lk queries and keys of a segment,
Q query heads, K kv heads, D head size of queries and keys, Dv of values.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_kernels.ops.attention.base import Attention, Plan, Segments, Visibility
from mcore_kernels.ops.attention.traced import TracedPlan
from mcore_kernels.protocols import accumulation_dtype


class PackedAttention(Attention):
    """Attention whose kernel takes a batch of equally long segments.

    A subclass gives the two blocks. They never see a query without a visible key.
    """

    @abstractmethod
    def forward_block(
        self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility
    ) -> tuple[Tensor, Tensor]:
        """q [B, lq, Q, D], k [B, lk, K, D], v [B, lk, K, Dv] → [B, lq, Q, Dv], lse [B, lq, Q]."""

    @abstractmethod
    def backward_block(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        visibility: Visibility,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k, v; `out` and `lse` may be merged over further blocks of keys."""

    def plan(self, q: Tensor, k: Tensor, segments: Segments, visibility: Visibility) -> Plan:
        """Find the runs of equal segments; reads the lengths back unless they are uniform."""
        if segments.uniform is None and torch.compiler.is_compiling():
            return TracedPlan(op=self, segments=segments, visibility=visibility)
        runs = _runs(q, k, segments)
        whole = (
            len(runs) == 1
            and runs[0].count * runs[0].lq == q.shape[0] > 0
            and runs[0].count * runs[0].lk == k.shape[0]
            and visibility.blind_rows(runs[0].lq, runs[0].lk) == 0
        )
        return PackedPlan(op=self, runs=runs, visibility=visibility, whole=whole)


@dataclass(frozen=True, kw_only=True)
class Run:
    """`count` neighbouring segments of one length; the first starts at these rows."""

    count: int
    lq: int
    lk: int
    start_q: int
    start_k: int

    def queries(self, x: Tensor, skip: int) -> Tensor:
        """The run's rows [B, lq - skip, …] of x [Tq, …]: a view, less each segment's first."""
        rows = x.narrow(0, self.start_q, self.count * self.lq)
        return rows.view(self.count, self.lq, *x.shape[1:])[:, skip:]

    def keys(self, x: Tensor) -> Tensor:
        """The run's rows [B, lk, …] of x [Tk, …]: a view."""
        rows = x.narrow(0, self.start_k, self.count * self.lk)
        return rows.view(self.count, self.lk, *x.shape[1:])


def check_ends(q: Tensor, k: Tensor, segments: Segments) -> None:
    """ValueError where the last segment ends beyond the rows; reads the ends back."""
    if segments.uniform is not None:  # its ends are not read, and were compared with the rows
        return
    end_q, end_k = int(segments.cu_seqlens_q[-1]), int(segments.cu_seqlens_k[-1])
    if end_q > q.shape[0] or end_k > k.shape[0]:
        raise ValueError(
            f"attention: cu_seqlens end at rows {end_q} and {end_k}, beyond the {q.shape[0]} of q "
            f"or the {k.shape[0]} of k"
        )


def _runs(q: Tensor, k: Tensor, segments: Segments) -> tuple[Run, ...]:
    if segments.uniform is not None:
        count, length = segments.uniform
        return (Run(count=count, lq=length, lk=length, start_q=0, start_k=0),)
    check_ends(q, k, segments)
    ends_q, ends_k = segments.cu_seqlens_q.tolist(), segments.cu_seqlens_k.tolist()
    runs: list[Run] = []
    for a, b, c, d in zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True):
        lq, lk = b - a, d - c
        if runs and (runs[-1].lq, runs[-1].lk) == (lq, lk):
            last = runs[-1]
            runs[-1] = Run(
                count=last.count + 1, lq=lq, lk=lk, start_q=last.start_q, start_k=last.start_k
            )
        else:
            runs.append(Run(count=1, lq=lq, lk=lk, start_q=a, start_k=c))
    return tuple(runs)


@dataclass(frozen=True, kw_only=True)
class PackedPlan(Plan):
    """A kernel carried over runs; `whole` when one run without blind queries is all there is."""

    op: PackedAttention
    runs: tuple[Run, ...]
    visibility: Visibility
    whole: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `mcore_kernels.ops.attention.base.Plan`."""
        if self.whole:
            run = self.runs[0]
            block = self.op.forward_block(
                run.queries(q, 0), run.keys(k), run.keys(v), self.visibility
            )
            return block[0].flatten(0, 1), block[1].flatten(0, 1)
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=accumulation_dtype(q.dtype))
        for run, skip in self._visible():
            block = self.op.forward_block(
                run.queries(q, skip), run.keys(k), run.keys(v), self.visibility
            )
            run.queries(out, skip).copy_(block[0])
            run.queries(lse, skip).copy_(block[1])
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `mcore_kernels.ops.attention.base.Plan`."""
        by_query, by_key = (grad_out, q, out, lse), (k, v)
        if self.whole:
            dq, dk, dv = self._backward_run(self.runs[0], 0, by_query, by_key)
            return dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for run, skip in self._visible():
            grads = self._backward_run(run, skip, by_query, by_key)
            run.queries(dq, skip).copy_(grads[0])
            run.keys(dk).copy_(grads[1])
            run.keys(dv).copy_(grads[2])
        return dq, dk, dv

    def _visible(self) -> Iterator[tuple[Run, int]]:
        """The runs where a query sees a key, each with how many first queries see none."""
        for run in self.runs:
            skip = self.visibility.blind_rows(run.lq, run.lk)
            if run.count and skip < run.lq:
                yield run, skip

    def _backward_run(
        self, run: Run, skip: int, by_query: tuple[Tensor, ...], by_key: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_out, q, out, lse = (run.queries(x, skip) for x in by_query)
        k, v = (run.keys(x) for x in by_key)
        return self.op.backward_block(
            grad_out, q, k, v, out=out, lse=lse, visibility=self.visibility
        )
