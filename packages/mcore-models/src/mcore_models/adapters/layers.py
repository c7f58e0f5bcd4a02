"""Low-rank adapters of linear layers, cut over the ranks as the layer is.

T tokens, R rows of experts, I input and O output features, r the rank, P adapted parts of a layer.
The adapter is a module `lora` inside the layer, and is added to what the layer returns; the layer
itself, its name and the names of its tensors stay as they were.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_models.adapters.config import LoRAConfig
from mcore_models.common.context import TokenContext
from mcore_parallel import Group, Init, ParamSpec, dropout, scatter_to_group
from mcore_parallel.collectives import (
    copy_to_group,
    gather_sequence,
    reduce_from_group,
    reduce_scatter_sequence,
)
from mcore_parallel.expert import ExpertColumnLinear, ExpertRowLinear, grouped_linear
from mcore_parallel.expert.rows_of import Counts
from mcore_parallel.layout import Box, TensorLayout
from mcore_parallel.spec import GradSync, join
from mcore_parallel.tensor import ColumnParallelLinear, RowParallelLinear, fused_spec

Linear = ColumnParallelLinear | RowParallelLinear | ExpertColumnLinear | ExpertRowLinear
_ZEROS = Init(kind="zeros")


def part_names(linear: Linear, name: str) -> tuple[str, ...]:
    """The names of the linear layers that lie in the module `name`, in their local order."""
    fused = isinstance(linear, ExpertColumnLinear) or getattr(linear, "fused", False)
    if not fused or isinstance(linear, RowParallelLinear | ExpertRowLinear):
        return (name,)
    parent = name.rpartition(".")[0]
    return tuple(join(parent, part.name) for part in linear.parts)


class Adapter(nn.Module):
    """A and B of the adapted parts of one linear layer.

    Args:
        base: the layer.
        name: its name in the model.
        adapted: which of its parts have an adapter, in their order.
        config: rank, scale and dropout.
        tp: the tensor-parallel group of the model.
    """

    def __init__(
        self, base: Linear, name: str, adapted: Sequence[int], config: LoRAConfig, tp: Group
    ) -> None:
        super().__init__()
        self.name, self.config, self.adapted = name, config, tuple(adapted)
        self.context: TokenContext | None = None
        self._tp = tp
        # Not as a module of its own: the layer holds the adapter, not the other way about.
        self.__dict__["base"] = base
        # Of experts the products as they are now: adapters keep theirs where the layer's change.
        self._products: Any = base.linear
        bound = 1 / math.sqrt(base.in_features)
        self._init = Init(kind="uniform", low=-bound, high=bound)
        *stack, _, inputs = base.weight.shape
        rank, outputs = config.rank, sum(self._rows[i] for i in self.adapted)
        self.a = nn.Parameter(base.weight.new_zeros(*stack, len(self.adapted) * rank, inputs))
        self.b = nn.Parameter(base.weight.new_zeros(*stack, outputs, rank))

    @property
    def _rows(self) -> tuple[int, ...]:
        """The local output features of each part of the layer."""
        base: Any = self.base
        if isinstance(base, ColumnParallelLinear):
            return base.local_sizes
        if isinstance(base, ExpertColumnLinear):
            return tuple(part.features // base.etp.size for part in base.parts)
        return (base.out_features,)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """A [r, I] and B [O, r] of each adapted part, local, of experts stacked [e, …]."""
        rows = [self._rows[i] for i in self.adapted]
        a, b = torch.split(self.a, self.config.rank, -2), torch.split(self.b, rows, -2)
        return list(zip(a, b, strict=True))

    def delta(self) -> Tensor:
        """What the adapters add to the local weight, fp32, of its shape: scale · B A."""
        base: Any = self.base
        whole = torch.zeros_like(base.weight, dtype=torch.float32)
        places = torch.split(whole, list(self._rows), -2)
        with torch.no_grad():
            for i, (a, b) in zip(self.adapted, self.pairs(), strict=True):
                places[i].copy_((b.float() @ a.float()) * self.config.scale)
        return whole

    def forward(self, x: Tensor, *counts: Counts) -> Tensor:
        """What is added to the layer's output for its input x, of the output's shape."""
        base: Any = self.base
        x = x.reshape(-1, x.shape[-1])
        if isinstance(base, RowParallelLinear) and not base.input_is_parallel:
            x = scatter_to_group(x, base.group, dim=-1)
        x = self._dropped(x)
        if counts:
            found = self._of_experts(x, counts[0])
        elif isinstance(base, RowParallelLinear):
            found = self._of_rows(x, base)
        else:
            found = self._of_columns(x, base)
        return found * self.config.scale

    def _of_columns(self, x: Tensor, base: ColumnParallelLinear) -> Tensor:
        inner = F.linear(x, self.a)
        # Of the narrow A x alone, every rank's tokens are sent.
        spread = gather_sequence if base.sequence_parallel else copy_to_group
        inner = spread(inner, base.group)
        return self._spread_out(inner, [F.linear(u, b) for u, b in self._inner_with_b(inner)])

    def _of_rows(self, x: Tensor, base: RowParallelLinear) -> Tensor:
        inner = F.linear(x, self.a)
        add = reduce_scatter_sequence if base.sequence_parallel else reduce_from_group
        return F.linear(add(inner, base.group), self.b)

    def _of_experts(self, x: Tensor, counts: Counts) -> Tensor:
        """As the layer: shares of sums over etp, which whoever moves the rows makes."""
        inner = grouped_linear(x, self.a, None, counts, op=self._products)
        found = [
            grouped_linear(u.contiguous(), b.contiguous(), None, counts, op=self._products)
            for u, b in self._inner_with_b(inner)
        ]
        return self._spread_out(inner, found)

    def _inner_with_b(self, inner: Tensor) -> list[tuple[Tensor, Tensor]]:
        b = [b for _, b in self.pairs()]
        return list(zip(torch.split(inner, self.config.rank, -1), b, strict=True))

    def _spread_out(self, inner: Tensor, found: Sequence[Tensor]) -> Tensor:
        """The outputs of the adapted parts in their places among zeros [T, O here]."""
        named = dict(zip(self.adapted, found, strict=True))
        if len(named) == len(self._rows) == 1:
            return found[0]
        rows = enumerate(self._rows)
        return torch.cat([named.get(i, inner.new_zeros(len(inner), n)) for i, n in rows], dim=-1)

    def _dropped(self, x: Tensor) -> Tensor:
        """x with elements dropped, by global token and input feature."""
        if not (self.training and self.config.dropout):
            return x
        context, base = self.context, self.base
        if context is None or context.rng is None or context.batch.rows is None:
            missing = "rows in the batch" if context and context.rng else "rng=RngKey(…)"
            raise ValueError(
                f"lora.dropout={self.config.dropout} in training mode needs {missing}; "
                f"call eval() to run without dropout"
            )
        rows = context.batch.rows
        if len(rows) != len(x):  # under sequence parallelism, of this rank's tokens
            rows = rows[self._tp.rank * len(x) :][: len(x)]
        first = base.group.rank * x.shape[-1] if isinstance(base, RowParallelLinear) else 0
        key = context.rng.fold("lora", self.name)
        return dropout(x, self.config.dropout, key, rows, first)

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """The specs of `a` and `b`; global names are those of `docs/tensor-names.md`.

        `<linear>.lora_a.weight` [r, I] and `<linear>.lora_b.weight` [O, r] for each part, of
        experts [E, r, I] and [E, O, r].
        """
        base: Any = self.base
        place = prefix.rpartition(".")[0]
        names = [part_names(base, place)[i] for i in self.adapted]
        if isinstance(base, ExpertColumnLinear | ExpertRowLinear):
            return self._expert_specs(base, names)
        if isinstance(base, RowParallelLinear):
            return self._row_specs(base, names[0])
        return self._column_specs(base, names, place)

    def _column_specs(
        self, base: ColumnParallelLinear, names: Sequence[str], place: str
    ) -> dict[str, ParamSpec]:
        group, rank = base.group, self.config.rank
        shape = (rank, base.in_features)
        a = TensorLayout.concat([TensorLayout.whole(_a(name), shape) for name in names])
        parts = {_b(n): base.parts[i] for n, i in zip(names, self.adapted, strict=True)}
        b = fused_spec(parts, group, (rank,), init=_ZEROS, decay=True)
        if group.size > 1:
            sync = _over(group) if base.sequence_parallel else ()
            a = a.replicated(group.rank, group.size)
            return {"a": ParamSpec(layout=a, init=self._init, grad_sync=sync), "b": b}
        # A layer that is whole on every rank: what holds for its weight holds for both.
        weight = base.param_specs(place)["weight"]
        sync = tuple(GradSync(group=sync.group) for sync in weight.grad_sync)
        copy = weight.layout.fragments[0]
        a = a.replicated(copy.replica, copy.num_replicas)
        layout = b.layout.replicated(copy.replica, copy.num_replicas)
        return {
            "a": ParamSpec(layout=a, init=self._init, grad_sync=sync),
            "b": replace(b, layout=layout, grad_sync=sync),
        }

    def _row_specs(self, base: RowParallelLinear, name: str) -> dict[str, ParamSpec]:
        group, rank = base.group, self.config.rank
        local = base.in_features // group.size
        box = Box((0, local * group.rank), (rank, local))
        a = TensorLayout.box(_a(name), (rank, base.in_features), box)
        b = TensorLayout.whole(_b(name), (base.out_features, rank))
        sync = _over(group) if base.sequence_parallel else ()
        return {
            "a": ParamSpec(layout=a, init=self._init),
            "b": ParamSpec(
                layout=b.replicated(group.rank, group.size), init=_ZEROS, grad_sync=sync
            ),
        }

    def _expert_specs(
        self, base: ExpertColumnLinear | ExpertRowLinear, names: Sequence[str]
    ) -> dict[str, ParamSpec]:
        etp, rank, (own, total) = base.etp, self.config.rank, (base.local_experts, base.num_experts)
        first = base.ep.rank * own

        def cut(name: str, shape: tuple[int, int], dim: int | None) -> TensorLayout:
            """My experts of [E, *shape], of which etp cuts `dim`."""
            corner, size = [first, 0, 0], [own, *shape]
            if dim is not None:
                size[1 + dim] //= etp.size
                corner[1 + dim] = size[1 + dim] * etp.rank
            layout = TensorLayout.box(name, (total, *shape), Box(tuple(corner), tuple(size)))
            return layout if dim is not None else layout.replicated(etp.rank, etp.size)

        by_columns = isinstance(base, ExpertColumnLinear)
        if isinstance(base, ExpertColumnLinear):
            outputs = [base.parts[i].features for i in self.adapted]
        else:
            outputs = [base.out_features]
        cut_a, cut_b = (None, 0) if by_columns else (1, None)
        a = [cut(_a(name), (rank, base.in_features), cut_a) for name in names]
        b = [cut(_b(n), (size, rank), cut_b) for n, size in zip(names, outputs, strict=True)]
        sync = _over(etp)
        return {
            "a": ParamSpec(
                layout=TensorLayout.concat(a, dim=1),
                init=self._init,
                grad_sync=sync if by_columns else (),
                expert=True,
            ),
            "b": ParamSpec(
                layout=TensorLayout.concat(b, dim=1),
                init=_ZEROS,
                grad_sync=() if by_columns else sync,
                expert=True,
            ),
        }


def _a(name: str) -> str:
    return join(name, "lora_a.weight")


def _b(name: str) -> str:
    return join(name, "lora_b.weight")


def _over(group: Group) -> tuple[GradSync, ...]:
    return (GradSync(group=group),) if group.size > 1 else ()
