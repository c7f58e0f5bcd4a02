"""The operators that this package uses but leaves to others to make fast.

Each protocol states what an implementation owes; each has a plain-torch default here, so that
the package works alone. Faster ones are passed in by whoever assembles a model.

Shapes: T tokens, I/O input and output features, N segments, Q query heads, K kv heads,
D head size of queries and keys, Dv head size of values, V columns of a vocabulary shard.
"Accumulation dtype" means float32, or float64 when the input is float64.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_parallel.torch_attention import TorchAttention, accumulation_dtype

__all__ = [
    "SGD",
    "AttentionGradOp",
    "AttentionOp",
    "Encoded",
    "EncodedLinearOp",
    "LinearOp",
    "TorchAttention",
    "TorchLinear",
    "TorchVocabLoss",
    "UpdateRule",
    "VocabLossOp",
]


# ---------------------------------------------------------------------------------- linear


class LinearOp(Protocol):
    """A matrix product `y = x Wᵀ (+ b)` with its three GEMMs reachable one by one.

    `__call__` is the whole operator for autograd. The tensor-parallel layers, which put
    communication between the GEMMs, and schedules that delay weight gradients use the methods;
    both ways must give the same numbers.
    """

    amax_reduce: Callable[[Tensor], Tensor] | None
    """Hook for implementations with scaling factors: given the local absolute maxima, returns
    the maxima over all ranks that share a scale. None: scales are local. Implementations without
    scaling factors never call it."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x weightᵀ + bias`: x [T, I], weight [O, I], bias [O] → [T, O]."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return `x weightᵀ` [T, O] without recording autograd; a fresh tensor."""

    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return `dy weight`: dy [T, O], weight [O, I] → [T, I]; a fresh tensor."""

    def weight_grad(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return `dyᵀ x`: dy [T, O], x [T, I] → [O, I].

        With `out` (any float dtype, usually a float32 gradient buffer) the product is ADDED to it
        at the precision of `out`, and `out` is returned.
        """


Encoded: TypeAlias = tuple[Tensor, ...]
"""A factor in a form of an operator's own."""


class EncodedLinearOp(LinearOp, Protocol):
    """A `LinearOp` whose factors take a form of its own, such as numbers of 8 bits and scales.

    Layers know it by its method `encode`. Each factor is encoded once for all products that it has
    a part in, and what is kept of the input for the backward pass is its encoding. The products are
    those of the methods of `LinearOp`.
    """

    def encode(
        self,
        role: str,
        x: Tensor,
        *,
        along: bool = True,
        across: bool = True,
        learn: bool = True,
        like: Encoded | None = None,
    ) -> tuple[Encoded | None, Encoded | None]:
        """Return a matrix along its rows, and along its columns; None where that is not wanted.

        role: "input", "weight" or "grad" (of the output). learn: whether statistics may take note
        of it: a graph is recorded. like: an encoding along the rows of this very matrix; what it
        shares with the one to be found (scales of the whole) is taken from there, and nothing is
        communicated. Without it the operator may call `amax_reduce`.
        """

    def output(self, x: Encoded, weight: Encoded, dtype: torch.dtype) -> Tensor:
        """Return `x weightᵀ` [T, O], a fresh tensor: both along."""

    def input_gradient(self, dy: Encoded, weight: Encoded, dtype: torch.dtype) -> Tensor:
        """Return `dy weight` [T, I], a fresh tensor: dy along, the weight across."""

    def weight_gradient(
        self, dy: Encoded, x: Encoded, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """Return `dyᵀ x` [O, I], both across; with `out` as `LinearOp.weight_grad`."""


class TorchLinear:
    """`LinearOp` from torch's own matrix products."""

    amax_reduce: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `LinearOp`."""
        return F.linear(x, weight, bias)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `LinearOp`."""
        with torch.no_grad():
            return x @ weight.t()

    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor:
        """See `LinearOp`."""
        with torch.no_grad():
            return dy @ weight

    def weight_grad(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `LinearOp`."""
        with torch.no_grad():
            if out is None:
                return dy.t() @ x
            # Rounding each micro-batch's product to bf16 would defeat a float32 buffer.
            return out.addmm_(dy.t().to(out.dtype), x.to(out.dtype))


# ------------------------------------------------------------------------------- attention


class AttentionOp(Protocol):
    """Softmax attention over segments packed one after another (variable length)."""

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
        """Return `(out [Tq, Q, Dv], lse [Tq, Q])`; the gradient flows through `out` only.

        q [Tq, Q, D], k [Tk, K, D], v [Tk, K, Dv]; K divides Q, and query head h reads kv head
        h // (Q // K). `cu_seqlens_*` int32 [N+1]: segment n holds rows cu[n] … cu[n+1]-1; segments
        may be empty; rows past the last belong to none and give zeros. Nothing crosses a segment.
        `uniform=(B, S)` promises that there are B segments of S queries and S keys each, so that
        no value need be read back from the device.

        A query i of a segment with lq queries and lk keys stands at key position
        p = i + lk - lq (bottom-right alignment). `causal` shows it the keys j ≤ p; `window=w`
        shows it the keys j > p - w, and without `causal` also only those j < p + w: w keys,
        itself included, in the causal case. `scale` defaults to D^-½. `softcap` c makes a scaled
        score s into c · tanh(s / c). `sinks` [Q] are scores of one more key per head, without a
        value, that every query sees: they take their part of the softmax and get a gradient.

        lse is the natural log of the sum of exp of the scaled, visible scores (the sink among
        them), at least float32. A query that sees no key has out 0, lse -inf (or the sink's score)
        and no gradient.
        """


class AttentionGradOp(AttentionOp, Protocol):
    """An `AttentionOp` whose backward can be called by itself, as ring attention needs."""

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
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `(dq, dk, dv)`, shaped and typed as q, k, v.

        `out` and `lse` may come from more keys than k holds (they were merged over several
        blocks, or with a sink); the result is then this block's share, and the shares add up.
        """


# --------------------------------------------------------------------------- vocabulary loss


class VocabLossOp(Protocol):
    """The local arithmetic of a softmax loss over a vocabulary that is cut over ranks.

    The caller reduces over the ranks between the methods: maximum (max), then the partials (sum).
    With z the logits, m their global maximum, s the global sum of exp(z - m), and a weight per
    class that adds up to 1 (`on_target` on the label's class plus `on_all` on every class):

        loss = log s - on_target · (z_label - m) - on_all · Σ_j (z_j - m)

    All shards hold real columns only; their row stride may exceed V (a slice of a padded shard),
    and V may be 0. `labels` int64 [T] count columns of this shard; a value outside [0, V) means
    that the label's column is not here.
    """

    def local_max(self, logits: Tensor) -> Tensor:
        """The largest logit of each row [T] in the accumulation dtype; -inf when V is 0."""

    def partials(
        self, logits: Tensor, labels: Tensor, maximum: Tensor, *, smoothing: bool
    ) -> Tensor:
        """This shard's share [3, T] of (s, z_label - m, Σ_j (z_j - m)), accumulation dtype.

        The second row is 0 where the label is not here. The third is 0 without `smoothing`.
        """

    def backward(
        self,
        logits: Tensor,
        labels: Tensor,
        maximum: Tensor,
        sum_exp: Tensor,
        grad: Tensor,
        *,
        on_target: float,
        on_all: float,
        out: Tensor,
    ) -> None:
        """Write grad · (exp(z - m)/s - on_target · [j is the label] - on_all) into `out` [T, V].

        `maximum` and `sum_exp` [T] are global, `grad` [T] is the loss's gradient. `out` may have
        a row stride above V and another dtype, and may be `logits` itself.
        """

    def gradient(
        self,
        logits: Tensor,
        labels: Tensor,
        maximum: Tensor,
        sum_exp: Tensor,
        *,
        on_softmax: Tensor,
        on_surprise: Tensor | None,
        on_target: Tensor,
        on_all: Tensor | None,
        out: Tensor,
    ) -> None:
        """Write p · (on_softmax + on_surprise · (z - m)) - on_target · [j is the label] - on_all.

        p = exp(z - m)/s. The coefficients [T] are per token; None means 0. Gradients of losses to
        which functions of log s or of the entropy are added have this form. Other arguments as in
        `backward`.
        """


class TorchVocabLoss:
    """`VocabLossOp` in plain torch."""

    def local_max(self, logits: Tensor) -> Tensor:
        """See `VocabLossOp`."""
        dtype = accumulation_dtype(logits.dtype)
        if logits.shape[1] == 0:
            return logits.new_full((logits.shape[0],), -torch.inf, dtype=dtype)
        return logits.amax(-1).to(dtype)

    def partials(
        self, logits: Tensor, labels: Tensor, maximum: Tensor, *, smoothing: bool
    ) -> Tensor:
        """See `VocabLossOp`."""
        result = maximum.new_zeros(3, logits.shape[0])
        if logits.shape[1] == 0:
            return result
        shifted = logits.to(maximum.dtype) - maximum.unsqueeze(1)
        column, here = _local_labels(labels, logits.shape[1])
        # where, not a product: a masked-out logit of -inf must not turn into NaN.
        result[1] = torch.where(here, shifted.gather(1, column.unsqueeze(1)).squeeze(1), 0.0)
        if smoothing:
            result[2] = shifted.sum(-1)
        result[0] = shifted.exp_().sum(-1)
        return result

    def backward(
        self,
        logits: Tensor,
        labels: Tensor,
        maximum: Tensor,
        sum_exp: Tensor,
        grad: Tensor,
        *,
        on_target: float,
        on_all: float,
        out: Tensor,
    ) -> None:
        """See `VocabLossOp`."""
        if logits.shape[1] == 0:
            return
        p = (logits.to(maximum.dtype) - maximum.unsqueeze(1)).exp_().div_(sum_exp.unsqueeze(1))
        column, here = _local_labels(labels, logits.shape[1])
        p.scatter_add_(1, column.unsqueeze(1), here.to(p.dtype).mul_(-on_target).unsqueeze(1))
        if on_all:
            p.sub_(on_all)
        out.copy_(p.mul_(grad.unsqueeze(1)))

    def gradient(
        self,
        logits: Tensor,
        labels: Tensor,
        maximum: Tensor,
        sum_exp: Tensor,
        *,
        on_softmax: Tensor,
        on_surprise: Tensor | None,
        on_target: Tensor,
        on_all: Tensor | None,
        out: Tensor,
    ) -> None:
        """See `VocabLossOp`."""
        if logits.shape[1] == 0:
            return
        shifted = logits.to(maximum.dtype) - maximum.unsqueeze(1)
        factor = on_softmax.unsqueeze(1)
        if on_surprise is not None:
            # A logit of -inf has p = 0, and 0 · -inf would be NaN.
            surprise = shifted.masked_fill(shifted == -torch.inf, 0.0)
            factor = factor + on_surprise.unsqueeze(1) * surprise
        result = shifted.exp_().div_(sum_exp.unsqueeze(1)).mul_(factor)
        column, here = _local_labels(labels, logits.shape[1])
        at_label = torch.where(here, -on_target, 0.0)
        result.scatter_add_(1, column.unsqueeze(1), at_label.unsqueeze(1))
        if on_all is not None:
            result.sub_(on_all.unsqueeze(1))
        out.copy_(result)


def _local_labels(labels: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Labels clamped into the shard, and whether each one really lies there."""
    return labels.clamp(0, columns - 1), (labels >= 0) & (labels < columns)


# ------------------------------------------------------------------------------ update rule


class UpdateRule(Protocol):
    """How an optimizer changes one tensor, given its gradient and its state.

    Tensors are float32 (or wider): whole parameters or flat slices of them, as the optimizer's
    partition says. A rule keeps nothing about a tensor outside `state`.
    """

    @property
    def state_names(self) -> tuple[str, ...]:
        """The keys of the state, which are also its names in a checkpoint."""

    def init(self, value: Tensor) -> dict[str, Tensor]:
        """A fresh state for `value`: tensors of its shape under `state_names`."""

    def update(
        self,
        value: Tensor,
        grad: Tensor,
        state: MutableMapping[str, Tensor],
        *,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """Change `value` and `state` in place; `grad` is left alone.

        `weight_decay` is decoupled (value ← value · (1 - lr · weight_decay)); `step` counts
        updates from 1.
        """


@runtime_checkable
class OnePassRule(UpdateRule, Protocol):
    """A rule that also scales the gradient and writes the rounded copy, in its one pass."""

    def update_once(
        self,
        value: Tensor,
        grad: Tensor,
        state: MutableMapping[str, Tensor],
        *,
        lr: float,
        weight_decay: float,
        step: int,
        grad_scale: float,
        copy: Tensor | None,
    ) -> None:
        """As `update` with `grad · grad_scale`; then `copy`, of the shape of `value`, is `value`
        rounded to its dtype. `grad` may be scaled in place.
        """


@dataclass(frozen=True, kw_only=True)
class SGD:
    """`UpdateRule`: stochastic gradient descent with heavy-ball momentum and decoupled decay.

    value ← value · (1 - lr · weight_decay) - lr · m, with m ← momentum · m + grad.
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"SGD: momentum is {self.momentum}, must be at least 0 and below 1")

    @property
    def state_names(self) -> tuple[str, ...]:
        """See `UpdateRule`."""
        return ("momentum",) if self.momentum else ()

    def init(self, value: Tensor) -> dict[str, Tensor]:
        """See `UpdateRule`."""
        return {name: torch.zeros_like(value) for name in self.state_names}

    def update(
        self,
        value: Tensor,
        grad: Tensor,
        state: MutableMapping[str, Tensor],
        *,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """See `UpdateRule`."""
        with torch.no_grad():
            if weight_decay:
                value.mul_(1.0 - lr * weight_decay)
            if self.momentum:
                grad = state["momentum"].mul_(self.momentum).add_(grad)
            value.add_(grad, alpha=-lr)
