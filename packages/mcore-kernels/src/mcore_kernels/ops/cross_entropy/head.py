"""The output layer and its loss together, some tokens at a time: logits are never whole.

Shapes: T tokens, H hidden, V columns of this shard of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.ops.cross_entropy.loss import (
    LossCall,
    LossTerms,
    TokenStats,
    VocabLoss,
    VocabShard,
)
from mcore_kernels.protocols import LinearOp, VocabLossOp

LOGITS_BYTES = 2**30
"""Logits held at a time unless `chunk_size` says otherwise: few enough chunks that adding each to
the float32 gradient of the weight does not take longer than the products."""

TILE = 256
"""Rows of a product's tile, of which chunks are multiples."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadLoss:
    """`total`: Σ of the weighted losses, differentiable. `tokens`: per token, without gradient."""

    total: Tensor
    tokens: VocabLoss


def fused_head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    linear: LinearOp,
    op: VocabLossOp,
    shard: VocabShard,
    terms: LossTerms | None = None,
    weights: Tensor | None = None,
    entropy: bool = False,
    chunk_size: int | None = None,
    weight_grad_out: Tensor | None = None,
    add_later: bool = False,
) -> HeadLoss:
    """Return the sum of the losses of `hidden weightᵀ`; both gradients are made in the forward.

    Three products in all, as without fusion, and one chunk of logits at a time. The gradient of
    the weight is summed in float32.

    Args:
        hidden: [T, H].
        weight: [V, H], this shard's real rows.
        labels: int64 [T], classes of the whole vocabulary.
        linear, op: the products and the loss's arithmetic (`Kernels.linear`, `.cross_entropy`).
        shard, terms, weights, entropy: as in `vocab_loss`. Weights carry the whole scale, such as
            one over the number of tokens in the global batch.
        chunk_size: tokens at a time; default: logits of 1 GiB.
        weight_grad_out: a buffer [V, H], float32 (float64 for such weights), that the gradient of
            the total is added to, already in this call, so that no second one of its size is
            needed; `weight` itself gets none then. The backward has to begin at the total: where
            its gradient is not 1, that of hidden is NaN.
        add_later: add in the backward, when the gradient of the total is known; takes the second
            buffer.

    The gradient of hidden is this shard's share: the caller sums it over the shards.

    Raises:
        ValueError: sizes do not fit together, or chunk_size is below 1.
    """
    call = LossCall(
        op=op, shard=shard, terms=terms or LossTerms(), on_all=0.0, entropy=entropy
    ).checked()
    chunk = _checked(hidden, weight, labels, chunk_size)
    plan = _Plan(
        call=call,
        linear=linear,
        chunk=chunk,
        add_later=add_later,
        records=torch.is_grad_enabled(),
    )
    wide = torch.promote_types(weight.dtype, torch.float32)
    if weight_grad_out is not None and (
        weight_grad_out.shape != weight.shape or weight_grad_out.dtype != wide
    ):
        raise ValueError(
            f"head loss: weight_grad_out must be {str(wide).removeprefix('torch.')} "
            f"{list(weight.shape)}, got "
            f"{str(weight_grad_out.dtype).removeprefix('torch.')} {list(weight_grad_out.shape)}"
        )
    total, loss, log_prob, found = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, weights, plan, weight_grad_out
    )
    tokens = VocabLoss(loss=loss, log_prob=log_prob, entropy=found if entropy else None)
    return HeadLoss(total=total, tokens=tokens)


def fused_head_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    linear: LinearOp,
    op: VocabLossOp,
    shard: VocabShard,
    terms: LossTerms | None = None,
    weights: Tensor | None = None,
    entropy: bool = False,
    chunk_size: int | None = None,
) -> VocabLoss:
    """Return loss, log-probability and entropy of each token, all differentiable.

    For gradients that are known only afterwards (policy gradients): logits are computed again in
    the backward, four products in all. Arguments and gradients as in `fused_head_loss`.
    """
    call = LossCall(
        op=op, shard=shard, terms=terms or LossTerms(), on_all=0.0, entropy=entropy
    ).checked()
    plan = _Plan(call=call, linear=linear, chunk=_checked(hidden, weight, labels, chunk_size))
    loss, log_prob, found = _HeadLogProbs.apply(hidden, weight, labels, weights, plan)  # type: ignore[no-untyped-call]
    return VocabLoss(loss=loss, log_prob=log_prob, entropy=found if entropy else None)


def _checked(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_size: int | None) -> int:
    tokens, columns = hidden.shape[0], weight.shape[0]
    if hidden.shape[1] != weight.shape[1] or labels.shape != (tokens,):
        raise ValueError(
            f"head loss: hidden {list(hidden.shape)}, weight {list(weight.shape)} and labels "
            f"{list(labels.shape)} do not fit: they are [T, H], [V, H] and [T]"
        )
    if chunk_size is not None:
        if chunk_size < 1:
            raise ValueError(f"head loss: chunk_size must be at least 1, got {chunk_size}")
        return chunk_size
    most = max(1, LOGITS_BYTES // max(1, columns * hidden.element_size()))
    chunks = max(1, -(-tokens // most))
    size = max(1, -(-tokens // chunks))  # of equal size, but whole tiles of a product
    return min(-(-size // TILE) * TILE, most) if size > TILE else size


@dataclass(frozen=True, kw_only=True)
class _Plan:
    call: LossCall
    linear: LinearOp
    chunk: int
    add_later: bool = False
    records: bool = True  # within an autograd function one cannot tell

    def chunks(self, tokens: int) -> Iterator[slice]:
        for start in range(0, tokens, self.chunk):
            yield slice(start, min(start + self.chunk, tokens))

    def empty_results(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        per_token = [hidden.new_zeros(hidden.shape[0], dtype=wide) for _ in range(3)]
        return per_token[0], per_token[1], per_token[2] if self.call.entropy else per_token[2][:0]

    def buffers(
        self,
        hidden: Tensor,
        weight: Tensor,
        needs: tuple[bool, bool],
        out: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Places for the gradients: of hidden in its dtype, of the weight at least float32."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        if out is None and needs[1]:
            out = torch.zeros_like(weight, dtype=wide)
        return torch.empty_like(hidden) if needs[0] else None, out if needs[1] else None

    def add_gradients(
        self,
        rows: slice,
        dlogits: Tensor,
        tensors: tuple[Tensor, Tensor],
        buffers: tuple[Tensor | None, Tensor | None],
    ) -> None:
        hidden, weight = tensors
        dhidden, dweight = buffers
        if dhidden is not None:
            dhidden[rows] = self.linear.input_grad(dlogits, weight)
        if dweight is not None:
            self.linear.weight_grad(dlogits, hidden[rows], out=dweight)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 -- autograd passes by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        plan: _Plan,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        results = plan.empty_results(hidden)
        at_once = None if plan.add_later else out
        needs = tuple(plan.records and one for one in ctx.needs_input_grad[:2])
        buffers = plan.buffers(hidden, weight, needs, at_once)  # type: ignore[arg-type]
        ones = torch.ones_like(results[0]) if weights is None else weights
        for rows in plan.chunks(hidden.shape[0]):
            logits = plan.linear.forward(hidden[rows], weight)
            stats = plan.call.forward(logits, labels[rows])
            of_chunk = plan.call.results(stats, None if weights is None else weights[rows])
            for whole, part in zip(results, of_chunk, strict=True):
                whole[rows] = part
            if any(one is not None for one in buffers):
                # The gradient takes the place of the logits.
                plan.call.write_gradient(logits, stats, (ones[rows], None, None), logits)
                plan.add_gradients(rows, logits, (hidden, weight), buffers)
            del logits  # before there are those of the next chunk
        ctx.added = at_once is not None and buffers[1] is not None
        ctx.save_for_backward(buffers[0], None if ctx.added else buffers[1])
        ctx.dtype, ctx.out = weight.dtype, out
        ctx.mark_non_differentiable(*results)
        return results[0].sum(), *results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        grad = grads[0]
        if ctx.added:
            # What was added cannot be scaled any more. Looking would wait for the device.
            grad = torch.where(grad == 1, 1.0, torch.nan)
        if dhidden is not None:
            dhidden = (dhidden * grad).to(dhidden.dtype)
        if dweight is not None and ctx.out is not None:
            ctx.out.addcmul_(dweight, grad)
            dweight = None
        if dweight is not None:
            # Rounded on the way: no second tensor of its size in float32.
            dweight = torch.mul(dweight, grad, out=torch.empty_like(dweight, dtype=ctx.dtype))
        return dhidden, dweight, None, None, None, None


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 -- autograd passes by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        results = plan.empty_results(hidden)
        kept = []
        for rows in plan.chunks(hidden.shape[0]):
            logits = plan.linear.forward(hidden[rows], weight)
            stats = plan.call.forward(logits, labels[rows])
            kept.append((stats.maximum, stats.sums))
            of_chunk = plan.call.results(stats, None if weights is None else weights[rows])
            for whole, part in zip(results, of_chunk, strict=True):
                whole[rows] = part
            del logits
        maximum = torch.cat([one for one, _ in kept]) if kept else results[0]
        sums = torch.cat([one for _, one in kept], 1) if kept else results[0].new_zeros(4, 0)
        ctx.save_for_backward(hidden, weight, labels, weights, maximum, sums)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, weights, maximum, sums = ctx.saved_tensors
        plan: _Plan = ctx.plan
        loss, log_prob, entropy = grads
        if loss is not None and weights is not None:
            loss = loss * weights
        wanted = (loss, log_prob, entropy if plan.call.entropy else None)
        buffers = plan.buffers(hidden, weight, ctx.needs_input_grad[:2])
        for rows in plan.chunks(hidden.shape[0]):
            logits = plan.linear.forward(hidden[rows], weight)
            stats = TokenStats(
                maximum=maximum[rows],
                sums=sums[:, rows],
                valid=labels[rows] != plan.call.terms.ignore_index,
                local=labels[rows] - plan.call.shard.first,
            )
            of_chunk = tuple(None if one is None else one[rows] for one in wanted)
            plan.call.write_gradient(logits, stats, of_chunk, logits)  # type: ignore[arg-type]
            plan.add_gradients(rows, logits, (hidden, weight), buffers)
            del logits
        dhidden, dweight = buffers
        return dhidden, None if dweight is None else dweight.to(weight.dtype), None, None, None
