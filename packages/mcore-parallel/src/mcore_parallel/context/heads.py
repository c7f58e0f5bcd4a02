"""Rows of some heads are exchanged for some rows of all heads, and back: attention, and the means.

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

__all__ = ["AllToAllAttention", "HeadExchange", "WideRows"]


@dataclass(frozen=True, kw_only=True, eq=False)
class WideRows:
    """The rows of all ranks of an exchange: their order, and the bounds of their documents.

    order [n · t]: where they are among the ranks' rows, one rank after another; inverse: the way
    back. cu_seqlens, uniform: as `AttentionOp` takes them.
    """

    order: Tensor
    inverse: Tensor
    cu_seqlens: Tensor
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
    ) -> WideRows:
        """Return what the exchanged rows are, from the bounds and numbers of this rank's.

        cu_seqlens, rows: those of queries and of keys. Reads the bounds from the device, unless
        `uniform` or for a batch that was asked about last.
        """
        size = self.group.size

        def make() -> WideRows:
            order = document_order(local_documents(cu_seqlens, uniform, rows), rows[0], size)
            return WideRows(
                order=order.to(device),
                inverse=order.argsort().to(device),
                cu_seqlens=(cu_seqlens[0] * size).to(torch.int32),
                uniform=None if uniform is None else (uniform[0], uniform[1] * size),
            )

        return self._plans.get(cu_seqlens, uniform, (rows, device), make)

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
        size = self.group.size
        rows = exchange(x.flatten(1).index_select(0, wide.inverse), self.group)
        return rows.view(size, x.shape[0] // size, *x.shape[1:]).transpose(0, 1).flatten(1, 2)

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
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionOp`. All ranks of the group call it together, backward included."""
        size, bounds = self.group.size, (cu_seqlens_q, cu_seqlens_k)
        check_heads(q.shape[1], k.shape[1], size)
        wide = None
        if size > 1:
            rows = q.shape[0], k.shape[0]
            wide = self._exchange.widen(bounds, uniform, rows, q.device)
            q, k, v = self._exchange.to_heads((q, k, v), wide)
            sinks = None if sinks is None else self._exchange.my_heads(sinks)
            bounds, uniform = (wide.cu_seqlens, wide.cu_seqlens), wide.uniform
        out, lse = self.op(
            q,
            k,
            v,
            cu_seqlens_q=bounds[0],
            cu_seqlens_k=bounds[1],
            max_seqlen_q=max_seqlen_q * size,
            max_seqlen_k=max_seqlen_k * size,
            uniform=uniform,
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        if wide is None:
            return out, lse
        lse = self._exchange.to_rows(lse.detach().unsqueeze(-1), wide).squeeze(-1)
        return self._exchange.to_rows(out, wide), lse


def _dealt(x: Tensor, size: int) -> Tensor:
    """[t, heads, D] to [n, t, heads per rank, D]; a head for several ranks is repeated."""
    rows, heads, width = x.shape
    if heads < size:
        # expand, so that the gradients of the copies are summed in one reduction
        x = x.unsqueeze(2).expand(rows, heads, size // heads, width).flatten(1, 2)
    return x.reshape(rows, size, x.shape[1] // size, width).transpose(0, 1)
