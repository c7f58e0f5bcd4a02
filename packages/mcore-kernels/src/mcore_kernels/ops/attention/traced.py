"""Packed attention where a compiler traces: lengths are read back when the graph runs.

Shapes: Tq and Tk rows of queries and keys, Q query heads, D head size of queries and keys, Dv of
values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary
from mcore_kernels.implementation import load_attribute
from mcore_kernels.ops.attention.base import Attention, Plan, Segments, Visibility
from mcore_kernels.protocols import accumulation_dtype


@dataclass(frozen=True, kw_only=True)
class TracedPlan(Plan):
    """Forward and backward of an attention without state, each one operator of torch."""

    op: Attention
    segments: Segments
    visibility: Visibility

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `Plan`."""
        out, lse = _forward_op(q, k, v, *self._arguments())
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Plan`."""
        dq, dk, dv = _backward_op(q, k, v, *self._arguments(), grad_out, out, lse)
        return dq, dk, dv

    def _arguments(self) -> tuple[object, ...]:
        kind, one, seen = type(self.op), self.segments, self.visibility
        return (
            one.cu_seqlens_q, one.cu_seqlens_k, one.max_seqlen_q, one.max_seqlen_k, seen.causal,
            seen.window, seen.scale, seen.softcap, f"{kind.__module__}:{kind.__qualname__}",
        )  # fmt: skip


def _plan(  # noqa: PLR0917 -- the operators' arguments, in their order
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    path: str,
) -> Plan:
    make: Callable[[], Attention] = load_attribute(path)
    segments = Segments(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        uniform=None,
    )
    visibility = Visibility(causal=causal, window=window, scale=scale, softcap=softcap)
    return make().plan(q, k, segments, visibility)


def _forward(q: Tensor, k: Tensor, v: Tensor, *call: object) -> tuple[Tensor, Tensor]:
    out, lse = _plan(q, k, *call).forward(q, k, v)  # type: ignore[arg-type]
    return out.contiguous(), lse.contiguous()


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))
    return q.new_empty(*q.shape[:2], v.shape[2]), lse


def _backward(q: Tensor, k: Tensor, v: Tensor, *call: object) -> tuple[Tensor, Tensor, Tensor]:
    *place, grad_out, out, lse = call
    plan = _plan(q, k, *place)  # type: ignore[arg-type]
    dq, dk, dv = plan.backward(grad_out, q, k, v, out=out, lse=lse)  # type: ignore[arg-type]
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _backward_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, bool causal, SymInt? window, float scale, float? softcap, str path"
)
_LIBRARY = OpLibrary()
_forward_op = _LIBRARY.define(
    f"packed_attention({_CALL}) -> (Tensor, Tensor)", _forward, fake=_forward_fake
)
_backward_op = _LIBRARY.define(
    f"packed_attention_backward({_CALL}, Tensor grad_out, Tensor out, Tensor lse) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    fake=_backward_fake,
)
