"""What ring and all-gather attention have in common: an `AttentionOp` made of calls on blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from mcore_parallel.context.blocks import Masking, Scores
from mcore_parallel.context.local import Documents, LastPlan, local_documents, whole_lengths
from mcore_parallel.group import Group
from mcore_parallel.protocols import AttentionGradOp, TorchAttention

__all__ = ["BlockwiseAttention"]

P = TypeVar("P")


class BlockwiseAttention(ABC, Generic[P]):
    """`AttentionOp` over the zigzag shares of `SequenceSplit`, planned once for every batch.

    q, k, v are this rank's rows, the bounds those of its documents (`local_bounds`), the same on
    all ranks.

    group: who shares the sequence. op: the attention of one block; default plain torch.
    """

    def __init__(self, group: Group, op: AttentionGradOp | None = None) -> None:
        self.group = group
        self.op: AttentionGradOp = TorchAttention() if op is None else op
        self._plans: LastPlan[P] = LastPlan()

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of ranks that share the rows."""

    @abstractmethod
    def plan(
        self,
        documents: Documents,
        lengths: Sequence[int],
        masking: Masking,
        rows: int,
        device: torch.device,
    ) -> P:
        """Return what `attend` needs to know of these documents, and of the whole ones' lengths."""

    @abstractmethod
    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, plan: P, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp; differentiable in q, k, v and sinks."""

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
        """See `ContextAttentionOp`. All ranks call it together, backward included."""
        if self.size == 1:
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
                softcap=softcap,
                sinks=sinks,
            )
        masking, bounds = Masking(causal, window), (cu_seqlens_q, cu_seqlens_k)
        rows = q.shape[0], k.shape[0]
        ends = None if causal else lengths  # a causal mask hides what is added

        def make() -> P:
            masking.check()
            documents = local_documents(bounds, uniform, rows)
            whole = whole_lengths(documents, self.size, ends)
            return self.plan(documents, whole, masking, rows[0], q.device)

        plan = self._plans.get(bounds, uniform, (masking, rows, q.device, ends), make)
        scores = Scores(q.shape[-1] ** -0.5 if scale is None else scale, softcap)
        return self.attend((q, k, v), sinks, plan, scores)
