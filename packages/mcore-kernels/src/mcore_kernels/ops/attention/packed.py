"""Attention over packed segments, given attention over a batch of equally long ones.

Shapes: T tokens, N segments, B segments of one length, lq and lk queries and keys of a segment,
Q query heads, K kv heads, D head size of queries and keys, Dv of values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.protocols import accumulation_dtype


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """Which keys a query sees, and the factor on the scores."""

    causal: bool
    window: int | None
    scale: float

    def blind_rows(self, lq: int, lk: int) -> int:
        """How many of the first queries see no key at all."""
        if lk == 0:
            return lq
        if self.causal:
            return min(lq, max(0, lq - lk))
        if self.window is not None:
            return min(lq, max(0, lq - lk - self.window + 1))
        return 0

    def hidden(self, lq: int, lk: int, device: torch.device) -> Tensor | None:
        """Mask [lq, lk] of the keys out of sight, aligned bottom-right; None: there are none."""
        # The last query sees every key up to the causal diagonal, so one alone needs no mask.
        if self.window is None and (not self.causal or lq == 1):
            return None
        position = torch.arange(lk - lq, lk, device=device).unsqueeze(1)
        key = torch.arange(lk, device=device)
        hidden = key > position if self.causal else torch.zeros_like(key > position)
        if self.window is not None:
            hidden |= key <= position - self.window
            if not self.causal:
                hidden |= key >= position + self.window
        return hidden


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
        """The run's rows [B, lk, …] of x [Tk, …] (a view)."""
        rows = x.narrow(0, self.start_k, self.count * self.lk)
        return rows.view(self.count, self.lk, *x.shape[1:])


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where the segments lie and who sees whom; `whole` when one run is all there is."""

    runs: tuple[Run, ...]
    visibility: Visibility
    whole: bool

    def visible(self) -> Iterator[tuple[Run, int]]:
        """The runs where a query sees a key, each with how many first queries see none."""
        for run in self.runs:
            skip = self.visibility.blind_rows(run.lq, run.lk)
            if run.count and skip < run.lq:
                yield run, skip


def packing(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    uniform: tuple[int, int] | None,
    visibility: Visibility,
) -> Packing:
    """Check the shapes and find the runs; reads `cu_seqlens` back unless `uniform` is given.

    Raises:
        ValueError: head counts that do not divide, row counts that do not fit, a window below 1.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attention: the number of kv heads must divide that of query heads, got {k.shape[1]} "
            f"and {q.shape[1]}"
        )
    if visibility.window is not None and visibility.window < 1:
        raise ValueError(f"attention: window must be at least 1, got {visibility.window}")
    if uniform is not None:
        count, length = uniform
        if not count * length == q.shape[0] == k.shape[0]:
            raise ValueError(
                f"attention: uniform={uniform} means {count * length} rows, got {q.shape[0]} of q "
                f"and {k.shape[0]} of k"
            )
        runs: tuple[Run, ...] = (Run(count=count, lq=length, lk=length, start_q=0, start_k=0),)
    else:
        ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        if len(ends_q) != len(ends_k):
            raise ValueError(
                f"attention: cu_seqlens_q has {len(ends_q) - 1} segments, cu_seqlens_k has "
                f"{len(ends_k) - 1}"
            )
        if ends_q[-1] > q.shape[0] or ends_k[-1] > k.shape[0]:
            raise ValueError(
                f"attention: cu_seqlens end at rows {ends_q[-1]} and {ends_k[-1]}, beyond the "
                f"{q.shape[0]} of q or the {k.shape[0]} of k"
            )
        runs = _runs(ends_q, ends_k)
    whole = (
        len(runs) == 1
        and runs[0].count * runs[0].lq == q.shape[0] > 0
        and runs[0].count * runs[0].lk == k.shape[0]
        and visibility.blind_rows(runs[0].lq, runs[0].lk) == 0
    )
    return Packing(runs=runs, visibility=visibility, whole=whole)


def _runs(ends_q: list[int], ends_k: list[int]) -> tuple[Run, ...]:
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


class PackedAttention(ABC):
    """`mcore_kernels.protocols.AttentionOp` from a kernel for equally long segments.

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
        """See `AttentionOp`."""
        visibility = _visibility(q, causal, window, scale)
        where = packing(q, k, cu_seqlens_q, cu_seqlens_k, uniform=uniform, visibility=visibility)
        call = _Call(op=self, where=where)
        out, lse = _Attention.apply(q, k, v, call)  # type: ignore[no-untyped-call]
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        uniform: tuple[int, int] | None = None,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionOp`."""
        visibility = _visibility(q, causal, window, scale)
        where = packing(q, k, cu_seqlens_q, cu_seqlens_k, uniform=uniform, visibility=visibility)
        with torch.no_grad():
            return _Call(op=self, where=where).backward(grad_out, q, k, v, out=out, lse=lse)


def _visibility(q: Tensor, causal: bool, window: int | None, scale: float | None) -> Visibility:
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return Visibility(causal=causal, window=window, scale=factor)


class _Attention(torch.autograd.Function):
    """Keeps q, k, v, out and lse; the scores are computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        out, lse = call.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return (*ctx.call.backward(grads[0], q, k, v, out=out, lse=lse), None)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A kernel carried over the runs of a packing."""

    op: PackedAttention
    where: Packing

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        visibility = self.where.visibility
        if self.where.whole:
            run = self.where.runs[0]
            block = self.op.forward_block(run.queries(q, 0), run.keys(k), run.keys(v), visibility)
            return block[0].flatten(0, 1), block[1].flatten(0, 1)
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=accumulation_dtype(q.dtype))
        for run, skip in self.where.visible():
            block = self.op.forward_block(
                run.queries(q, skip), run.keys(k), run.keys(v), visibility
            )
            run.queries(out, skip).copy_(block[0])
            run.queries(lse, skip).copy_(block[1])
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.where.whole:
            dq, dk, dv = self._backward_run(self.where.runs[0], 0, (grad_out, q, out, lse), (k, v))
            return dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for run, skip in self.where.visible():
            grads = self._backward_run(run, skip, (grad_out, q, out, lse), (k, v))
            run.queries(dq, skip).copy_(grads[0])
            run.keys(dk).copy_(grads[1])
            run.keys(dv).copy_(grads[2])
        return dq, dk, dv

    def _backward_run(
        self, run: Run, skip: int, by_query: tuple[Tensor, ...], by_key: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_out, q, out, lse = (run.queries(x, skip) for x in by_query)
        k, v = (run.keys(x) for x in by_key)
        return self.op.backward_block(
            grad_out, q, k, v, out=out, lse=lse, visibility=self.where.visibility
        )
