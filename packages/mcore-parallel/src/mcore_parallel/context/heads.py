"""All-to-all attention: rows of some heads are exchanged for some rows of all heads, and back.

Jacobs et al., "DeepSpeed Ulysses", 2023. n ranks of a group that hold neighbouring chunks exchange;
each then has Q / n heads of all their rows, which are a larger share of the same zigzag split.

t rows of this rank, Q query heads, K kv heads, D and Dv head sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel.collectives import exchange
from mcore_parallel.context.kinds import check_heads
from mcore_parallel.context.local import LastPlan, document_order, local_documents
from mcore_parallel.group import Group
from mcore_parallel.protocols import AttentionOp, TorchAttention

__all__ = ["AllToAllAttention"]


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
        size, bounds = self.group.size, (cu_seqlens_q, cu_seqlens_k)
        rows = q.shape[0], k.shape[0]
        check_heads(q.shape[1], k.shape[1], size)

        def make() -> _Plan:
            order = document_order(local_documents(bounds, uniform, rows), rows[0], size)
            cu_seqlens = (cu_seqlens_q * size).to(torch.int32)
            return _Plan(
                order=order.to(q.device),
                inverse=order.argsort().to(q.device),
                cu_seqlens=cu_seqlens,
                uniform=None if uniform is None else (uniform[0], uniform[1] * size),
            )

        if size == 1:
            plan = None
            wide_bounds, wide_uniform = bounds, uniform
        else:
            plan = self._plans.get(bounds, uniform, (rows, q.device), make)
            q, k, v = self._to_heads((q, k, v), plan)
            wide_bounds, wide_uniform = (plan.cu_seqlens, plan.cu_seqlens), plan.uniform
        out, lse = self.op(
            q,
            k,
            v,
            cu_seqlens_q=wide_bounds[0],
            cu_seqlens_k=wide_bounds[1],
            max_seqlen_q=max_seqlen_q * size,
            max_seqlen_k=max_seqlen_k * size,
            uniform=wide_uniform,
            causal=causal,
            window=window,
            scale=scale,
        )
        if plan is None:
            return out, lse
        return self._to_rows(out, plan), self._to_rows(lse.detach().unsqueeze(-1), plan).squeeze(-1)

    def _to_heads(self, qkv: Sequence[Tensor], plan: _Plan) -> list[Tensor]:
        """Give the other ranks their heads of my rows; return my heads of all rows, in order."""
        size = self.group.size
        parts = [_dealt(x, size) for x in qkv]
        shapes = [part.shape[2:] for part in parts]
        sent = torch.cat([part.flatten(2) for part in parts], 2)
        rows = exchange(sent.flatten(0, 1), self.group).index_select(0, plan.order)
        split = torch.split(rows, [shape.numel() for shape in shapes], dim=1)
        return [part.reshape(-1, *shape) for part, shape in zip(split, shapes, strict=True)]

    def _to_rows(self, x: Tensor, plan: _Plan) -> Tensor:
        """The way back: [n · t, Q / n, …] to [t, Q, …]."""
        size = self.group.size
        rows = exchange(x.flatten(1).index_select(0, plan.inverse), self.group)
        return rows.view(size, x.shape[0] // size, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Plan:
    """The order of the documents in all ranks' rows, and their bounds there."""

    order: Tensor
    inverse: Tensor
    cu_seqlens: Tensor
    uniform: tuple[int, int] | None


def _dealt(x: Tensor, size: int) -> Tensor:
    """[t, heads, D] to [n, t, heads per rank, D]; a head for several ranks is repeated."""
    rows, heads, width = x.shape
    if heads < size:
        # expand, so that the gradients of the copies are summed in one reduction
        x = x.unsqueeze(2).expand(rows, heads, size // heads, width).flatten(1, 2)
    return x.reshape(rows, size, x.shape[1] // size, width).transpose(0, 1)
