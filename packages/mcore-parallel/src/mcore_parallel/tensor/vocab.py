"""Embedding and output head over a vocabulary that is cut over a tensor-parallel group.

T tokens, H hidden, V vocabulary. The local tables are padded so that every rank has the same number
of rows; padding rows are zero, belong to no global tensor and get no gradient.

Parameters start at zero; `mcore_parallel.spec.initialise` or a load by layout fills them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_parallel.collectives import (
    copy_to_group,
    gather_from_group,
    gather_sequence,
    reduce_from_group,
    reduce_scatter_sequence,
)
from mcore_parallel.data.main_grad import added_to_main, has_lasting_main_grad, main_grad
from mcore_parallel.group import Group
from mcore_parallel.pipeline.weights import DeferredGradients
from mcore_parallel.protocols import LinearOp, TorchLinear
from mcore_parallel.spec import Init, ParamSpec, join
from mcore_parallel.tensor.function import parallel_linear
from mcore_parallel.tensor.linear import DEFAULT_INIT, ZEROS
from mcore_parallel.tensor.partition import VocabShard, check_tokens

__all__ = ["HeadUse", "VocabParallelEmbedding", "VocabParallelHead", "gather_logits"]


class VocabParallelEmbedding(nn.Module):
    """Table of V vectors, its rows cut over `group`: tokens int64 [T] → [T, H].

    Args:
        num_embeddings: V, the number of real tokens.
        embedding_dim: H.
        group: the ranks over which to cut; None: this process alone.
        sequence_parallel: the result is [T/size, H], my rows.
        multiple_of: pad the rows of each rank to a multiple of this.
        accumulate: add gradients to the table's `main_grad` where it has one, a row for each token,
            instead of making one of the whole table (see `parallel_linear`). Not for a table that
            other operators use too.
        init: initial values.
        device, dtype: of the table.

    Communicates over `group`: forward a sum (or reduce-scatter), backward, under sequence
    parallelism, an all-gather of the gradient.

    Raises:
        ValueError: when called: T is not divisible by the group's size under sequence parallelism;
            a token outside [0, V), which is looked at on the CPU only (elsewhere it would cost a
            synchronisation; such a token gives zeros or the device's own error).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: Group | None = None,
        sequence_parallel: bool = False,
        multiple_of: int = 1,
        accumulate: bool = False,
        init: Init = DEFAULT_INIT,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group = group or Group.single()
        self.shard = VocabShard.of(num_embeddings, self.group, multiple_of)
        self.accumulate = accumulate
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.sequence_parallel = sequence_parallel
        self.init = init
        table = torch.zeros(self.shard.rows, embedding_dim, device=device, dtype=dtype)
        self.weight = nn.Parameter(table)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors of `tokens` [T] (more dimensions may follow), see the class."""
        self._check(tokens)
        if self.group.size == 1:
            return self._look_up(tokens)
        local = tokens - self.shard.start
        elsewhere = (local < 0) | (local >= self.shard.real)
        # Any row for what is elsewhere, but not the same: their gradients, zeros, are added there.
        found = self._look_up(torch.where(elsewhere, tokens % self.shard.rows, local))
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if not self.sequence_parallel:
            return reduce_from_group(found, self.group)
        check_tokens("VocabParallelEmbedding", tokens.shape[0], self.group.size)
        return reduce_scatter_sequence(found, self.group)

    def _look_up(self, rows: Tensor) -> Tensor:
        if self.accumulate and getattr(self.weight, "main_grad", None) is not None:
            found: Tensor = _LookUp.apply(self.weight, rows)  # type: ignore[no-untyped-call]
            return found
        return F.embedding(rows, self.weight)

    def _check(self, tokens: Tensor) -> None:
        if tokens.device.type != "cpu" or not tokens.numel():
            return
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= self.num_embeddings:
            raise ValueError(
                f"VocabParallelEmbedding: token {low if low < 0 else high} is outside the "
                f"vocabulary of {self.num_embeddings} (0 to {self.num_embeddings - 1})"
            )

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """Return the spec of `weight`: global `<prefix>.weight` [V, H], without padding."""
        layout = self.shard.layout(join(prefix, "weight"), (self.embedding_dim,))
        return {"weight": ParamSpec(layout=layout, init=self.init, decay=True)}

    def extra_repr(self) -> str:
        """For printing."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={self.group.size}"


class _LookUp(torch.autograd.Function):
    """Rows of a table; gradients are added to its `main_grad`, in the same order each time."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor) -> Tensor:
        # The parameter itself: a saved tensor need not come back as the object with the attributes.
        ctx.weight = weight
        ctx.save_for_backward(rows)
        return F.embedding(rows, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        (rows,) = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None
        buffer = main_grad(ctx.weight)
        values = dy.reshape(-1, dy.shape[-1]).to(buffer.dtype)
        if buffer.device.type == "cpu":  # where several threads of index_put_ add in any order
            buffer.index_add_(0, rows.reshape(-1), values)
        else:
            buffer.index_put_((rows.reshape(-1),), values, accumulate=True)
        return added_to_main(ctx.weight), None


class HeadUse(Protocol):
    """What a head makes of its factors in place of logits, such as a loss in chunks."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, weight_grad_out: Tensor | None
    ) -> Tensor:
        """Return anything, a scalar for example, that is the same on all ranks of the group.

        Args:
            x: [T, H], all tokens. Its gradient is my share of a sum over the group.
            weight: [real, H], my rows without padding.
            bias: [real], theirs, of a head that has one.
            weight_grad_out: the float32 buffer [real, H] to which the gradient of the weight is to
                be added, before the backward pass has left this call; autograd gets none then. None
                where autograd takes it.
        """


class VocabParallelHead(nn.Module):
    """Logits over a cut vocabulary: x [T, H] → my columns [T, rows], padding columns included.

    `vocab_parallel_cross_entropy` and `gather_logits` leave the padding columns out.

    Args:
        in_features: H.
        vocab_size: V, the number of real tokens.
        group: the ranks over which to cut; None: this process alone.
        bias: add a bias per token.
        tied: own no weight; `forward` is given that of the embedding.
        gather_output: return all V logits on every rank, without padding.
        sequence_parallel: x is [T/size, H], my rows; the logits still have all T.
        multiple_of: pad the rows of each rank to a multiple of this, as in the embedding.
        linear: the matrix products; default `TorchLinear`.
        init: initial values of the weight (the bias starts at 0).
        device, dtype: of the parameters.

    Communicates over `group` as `ColumnParallelLinear` does.

    Raises:
        ValueError: when called: a weight given to a head that has one, or none to a tied one.
    """

    def __init__(
        self,
        in_features: int,
        vocab_size: int,
        *,
        group: Group | None = None,
        bias: bool = False,
        tied: bool = False,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        multiple_of: int = 1,
        linear: LinearOp | None = None,
        init: Init = DEFAULT_INIT,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group = group or Group.single()
        self.shard = VocabShard.of(vocab_size, self.group, multiple_of)
        self.in_features = in_features
        self.vocab_size = vocab_size
        self.gather_output = gather_output
        self.sequence_parallel = sequence_parallel
        self.linear: LinearOp = linear or TorchLinear()
        self.init = init
        rows = self.shard.rows
        self.weight: nn.Parameter | None
        self.bias: nn.Parameter | None
        if tied:
            self.register_parameter("weight", None)
        else:
            self.weight = nn.Parameter(torch.zeros(rows, in_features, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.zeros(rows, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)

    def forward(
        self, x: Tensor, weight: Tensor | None = None, *, use: HeadUse | None = None
    ) -> Tensor:
        """Return the local logits [T, rows], or with `gather_output` all of them [T, V].

        `weight` [rows, H]: the embedding's table, when the head is tied. Its gradient then always
        goes through autograd, never into a `main_grad` buffer, since the embedding adds to it too.

        `use` makes something else of all tokens and my rows, and that is returned. A subclass may
        do something with x before, and hands `use` on; what it returns is not a tensor of logits.
        """
        if (weight is None) == (self.weight is None):
            given = "has its own weight" if weight is not None else "is tied"
            raise ValueError(f"VocabParallelHead: the head {given}: pass a weight only when tied")
        chosen = self.weight if weight is None else weight
        assert chosen is not None
        if use is not None:
            return self._used(use, x, chosen)
        logits = parallel_linear(
            x,
            chosen,
            self.bias,
            linear=self.linear,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
            accumulate=weight is None,
        )
        if self.gather_output:
            return gather_logits(logits, self.group, vocab_size=self.vocab_size)
        return logits

    def _used(self, use: HeadUse, x: Tensor, weight: Tensor) -> Tensor:
        x = (gather_sequence if self.sequence_parallel else copy_to_group)(x, self.group)
        real, buffer = self.shard.real, None
        # Gradients that are reduced after every backward pass go through autograd: what is at hand
        # now has been reduced by then where other forward passes came between.
        has_buffer = weight is self.weight and has_lasting_main_grad(weight)
        if has_buffer and weight.requires_grad and torch.is_grad_enabled():
            buffer = main_grad(weight)[:real]
            weight = _AddedByOther.apply(weight)  # type: ignore[no-untyped-call]
        if real < self.shard.rows:
            weight = weight[:real]
        return use(x, weight, None if self.bias is None else self.bias[:real], buffer)

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """Return the specs of what the head owns: `<prefix>.weight` [V, H], `<prefix>.bias` [V]."""
        specs: dict[str, ParamSpec] = {}
        if self.weight is not None:
            layout = self.shard.layout(join(prefix, "weight"), (self.in_features,))
            specs["weight"] = ParamSpec(layout=layout, init=self.init, decay=True)
        if self.bias is not None:
            layout = self.shard.layout(join(prefix, "bias"))
            specs["bias"] = ParamSpec(layout=layout, init=ZEROS, decay=False)
        return specs

    def extra_repr(self) -> str:
        """For printing."""
        return f"{self.in_features}, {self.vocab_size}, tp={self.group.size}"


class _AddedByOther(torch.autograd.Function):
    """A weight for an operator that adds the gradient to `main_grad` and gives autograd none."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        assert grad is None, "the operator was to add it"
        deferred: DeferredGradients | None = getattr(ctx.weight, "deferred", None)
        if deferred is not None and deferred.is_collecting:
            # Others that use the weight may add to it as late as that.
            deferred.put(ctx.weight, partial(added_to_main, ctx.weight))
            return None
        return added_to_main(ctx.weight)


def gather_logits(logits: Tensor, group: Group, *, vocab_size: int) -> Tensor:
    """Return all V logits [T, V] from my columns [T, rows], without the padding columns.

    Padding columns are cut off, not masked, so a padding token cannot be sampled. The gradient of
    my columns is my slice. All-gather over `group`; ValueError when the columns are too few.
    """
    VocabShard.of_logits(vocab_size, logits.shape[-1], group)
    return gather_from_group(logits, group, dim=-1)[..., :vocab_size]
