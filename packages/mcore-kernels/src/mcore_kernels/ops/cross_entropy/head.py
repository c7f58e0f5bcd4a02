"""The output layer and its loss together, some tokens at a time: logits are never whole.

Shapes: T tokens, H hidden, V columns of this shard of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcore_kernels.ops.cross_entropy.changes import LogitsChange
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
the float32 gradient of the weight does not take longer than the products. What changes of the
logits keep beside them comes on top."""

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
    bias: Tensor | None = None,
    changes: Sequence[LogitsChange] = (),
    terms: LossTerms | None = None,
    weights: Tensor | None = None,
    entropy: bool = False,
    chunk_size: int | None = None,
    weight_grad_out: Tensor | None = None,
    add_later: bool = False,
) -> HeadLoss:
    """Return the sum of the losses of `hidden weightᵀ + bias`; gradients are made in the forward.

    Three products in all, as without fusion, and one chunk of logits at a time. The gradients of
    weight and bias are summed in float32.

    Args:
        hidden: [T, H].
        weight: [V, H], this shard's real rows.
        labels: int64 [T], classes of the whole vocabulary.
        linear, op: the products and the loss's arithmetic (`Kernels.linear`, `.cross_entropy`).
        bias: [V], of the same rows.
        changes: what is done to the logits before the loss, one after another.
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
    factors = _Factors(hidden, weight, bias)
    plan = _Plan(
        call=call,
        linear=linear,
        chunk=_checked(factors, labels, chunk_size),
        changes=tuple(changes),
        add_later=add_later,
        records=torch.is_grad_enabled(),
    )
    _check_buffer(weight, weight_grad_out)
    total, loss, log_prob, found = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        *factors, labels, weights, plan, weight_grad_out
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
    bias: Tensor | None = None,
    changes: Sequence[LogitsChange] = (),
    terms: LossTerms | None = None,
    weights: Tensor | None = None,
    entropy: bool = False,
    chunk_size: int | None = None,
    weight_grad_out: Tensor | None = None,
) -> VocabLoss:
    """Return loss, log-probability and entropy of each token, all differentiable.

    For gradients that are known only afterwards (policy gradients): logits are computed again in
    the backward, four products in all. Arguments and gradients as in `fused_head_loss`, except
    that the backward, whatever it begins at, is what adds to `weight_grad_out`.
    """
    call = LossCall(
        op=op, shard=shard, terms=terms or LossTerms(), on_all=0.0, entropy=entropy
    ).checked()
    factors = _Factors(hidden, weight, bias)
    chunk = _checked(factors, labels, chunk_size)
    plan = _Plan(call=call, linear=linear, chunk=chunk, changes=tuple(changes))
    _check_buffer(weight, weight_grad_out)
    loss, log_prob, found = _HeadLogProbs.apply(  # type: ignore[no-untyped-call]
        *factors, labels, weights, plan, weight_grad_out
    )
    return VocabLoss(loss=loss, log_prob=log_prob, entropy=found if entropy else None)


class _Factors(NamedTuple):
    """What logits are made of."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


class _Gradients(NamedTuple):
    """Places for the gradients of the factors; None where there is to be none."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @property
    def any(self) -> bool:
        """Whether there is one to be made."""
        return any(one is not None for one in self)


def _checked(factors: _Factors, labels: Tensor, chunk_size: int | None) -> int:
    hidden, weight, bias = factors
    tokens, columns = hidden.shape[0], weight.shape[0]
    if hidden.shape[1] != weight.shape[1] or labels.shape != (tokens,):
        raise ValueError(
            f"head loss: hidden {list(hidden.shape)}, weight {list(weight.shape)} and labels "
            f"{list(labels.shape)} do not fit: they are [T, H], [V, H] and [T]"
        )
    if bias is not None and bias.shape != (columns,):
        raise ValueError(f"head loss: bias must be [{columns}], got {list(bias.shape)}")
    if chunk_size is not None:
        if chunk_size < 1:
            raise ValueError(f"head loss: chunk_size must be at least 1, got {chunk_size}")
        return chunk_size
    most = max(1, LOGITS_BYTES // max(1, columns * hidden.element_size()))
    chunks = max(1, -(-tokens // most))
    size = max(1, -(-tokens // chunks))  # of equal size, but whole tiles of a product
    return min(-(-size // TILE) * TILE, most) if size > TILE else size


def _check_buffer(weight: Tensor, out: Tensor | None) -> None:
    wide = torch.promote_types(weight.dtype, torch.float32)
    if out is not None and (out.shape != weight.shape or out.dtype != wide):
        raise ValueError(
            f"head loss: weight_grad_out must be {str(wide).removeprefix('torch.')} "
            f"{list(weight.shape)}, got "
            f"{str(out.dtype).removeprefix('torch.')} {list(out.shape)}"
        )


@dataclass(frozen=True, kw_only=True)
class _Plan:
    call: LossCall
    linear: LinearOp
    chunk: int
    changes: tuple[LogitsChange, ...] = ()
    add_later: bool = False
    records: bool = True  # within an autograd function one cannot tell

    def chunks(self, tokens: int) -> Iterator[slice]:
        for start in range(0, tokens, self.chunk):
            yield slice(start, min(start + self.chunk, tokens))

    def empty_results(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        per_token = [hidden.new_zeros(hidden.shape[0], dtype=wide) for _ in range(3)]
        return per_token[0], per_token[1], per_token[2] if self.call.entropy else per_token[2][:0]

    def logits(
        self, rows: slice, factors: _Factors, labels: Tensor
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Those of some tokens [t, V], to be written over, and what the changes keep."""
        hidden, weight, bias = factors
        logits, kept = self.linear.forward(hidden[rows], weight), []
        if bias is not None:
            logits.add_(bias)
        for change in self.changes:
            logits, one = change.forward(logits, labels[rows])
            kept.append(one)
        return logits, kept

    def buffers(
        self, factors: _Factors, needs: Sequence[bool], out: Tensor | None = None
    ) -> _Gradients:
        """Places for the gradients: of hidden in its dtype, of the others at least float32."""
        hidden, weight, bias = factors
        wide = torch.promote_types(weight.dtype, torch.float32)
        if out is None and needs[1]:
            out = torch.zeros_like(weight, dtype=wide)
        return _Gradients(
            hidden=torch.empty_like(hidden) if needs[0] else None,
            weight=out if needs[1] else None,
            bias=None if bias is None or not needs[2] else torch.zeros_like(bias, dtype=wide),
        )

    def add_gradients(
        self,
        rows: slice,
        grad: Tensor,
        kept: Sequence[Tensor | None],
        factors: _Factors,
        buffers: _Gradients,
    ) -> None:
        """Add what the gradient of the changed logits makes of a chunk."""
        for change, one in zip(reversed(self.changes), reversed(kept), strict=True):
            grad = change.backward(grad, one)
        hidden, weight, _ = factors
        grad = grad.to(hidden.dtype)
        if buffers.hidden is not None:
            buffers.hidden[rows] = self.linear.input_grad(grad, weight)
        if buffers.weight is not None:
            self.linear.weight_grad(grad, hidden[rows], out=buffers.weight)
        if buffers.bias is not None:
            buffers.bias.add_(grad.sum(0, dtype=buffers.bias.dtype))


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 -- autograd passes by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor | None,
        plan: _Plan,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        factors, results = _Factors(hidden, weight, bias), plan.empty_results(hidden)
        at_once = None if plan.add_later else out
        needs = [plan.records and one for one in ctx.needs_input_grad[:3]]
        buffers = plan.buffers(factors, needs, at_once)
        ones = torch.ones_like(results[0]) if weights is None else weights
        for rows in plan.chunks(hidden.shape[0]):
            logits, kept = plan.logits(rows, factors, labels)
            stats = plan.call.forward(logits, labels[rows])
            of_chunk = plan.call.results(stats, None if weights is None else weights[rows])
            for whole, part in zip(results, of_chunk, strict=True):
                whole[rows] = part
            if buffers.any:
                # The gradient takes the place of the logits.
                plan.call.write_gradient(logits, stats, (ones[rows], None, None), logits)
                plan.add_gradients(rows, logits, kept, factors, buffers)
            del logits, kept  # before there are those of the next chunk
        ctx.added = at_once is not None and buffers.weight is not None
        ctx.save_for_backward(buffers.hidden, None if ctx.added else buffers.weight, buffers.bias)
        ctx.dtype, ctx.out = weight.dtype, out
        ctx.mark_non_differentiable(*results)
        return results[0].sum(), *results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight, dbias = ctx.saved_tensors
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
        if dbias is not None:
            dbias = (dbias * grad).to(ctx.dtype)
        return dhidden, dweight, dbias, None, None, None, None


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 -- autograd passes by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor | None,
        plan: _Plan,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        factors, results = _Factors(hidden, weight, bias), plan.empty_results(hidden)
        found = []
        for rows in plan.chunks(hidden.shape[0]):
            logits, kept = plan.logits(rows, factors, labels)
            stats = plan.call.forward(logits, labels[rows])
            found.append((stats.maximum, stats.sums))
            of_chunk = plan.call.results(stats, None if weights is None else weights[rows])
            for whole, part in zip(results, of_chunk, strict=True):
                whole[rows] = part
            del logits, kept
        maximum = torch.cat([one for one, _ in found]) if found else results[0]
        sums = torch.cat([one for _, one in found], 1) if found else results[0].new_zeros(4, 0)
        ctx.save_for_backward(hidden, weight, bias, labels, weights, maximum, sums)
        ctx.plan, ctx.out = plan, out
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *factored, labels, weights, maximum, sums = ctx.saved_tensors
        factors, plan = _Factors(*factored), ctx.plan
        loss, log_prob, entropy = grads
        if loss is not None and weights is not None:
            loss = loss * weights
        wanted = (loss, log_prob, entropy if plan.call.entropy else None)
        buffers = plan.buffers(factors, ctx.needs_input_grad[:3], ctx.out)
        for rows in plan.chunks(factors.hidden.shape[0]):
            logits, kept = plan.logits(rows, factors, labels)
            stats = TokenStats(
                maximum=maximum[rows],
                sums=sums[:, rows],
                valid=labels[rows] != plan.call.terms.ignore_index,
                local=labels[rows] - plan.call.shard.first,
            )
            of_chunk = tuple(None if one is None else one[rows] for one in wanted)
            plan.call.write_gradient(logits, stats, of_chunk, logits)
            plan.add_gradients(rows, logits, kept, factors, buffers)
            del logits, kept
        dweight = buffers.weight if ctx.out is None else None
        return (
            buffers.hidden,
            None if dweight is None else dweight.to(factors.weight.dtype),
            None if buffers.bias is None else buffers.bias.to(factors.weight.dtype),
            *(None,) * 4,
        )
