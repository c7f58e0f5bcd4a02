"""Linear layers whose weight is cut over a tensor-parallel group, by columns or by rows.

T tokens, I input features, O output features. "Column" and "row" are those of the matrix A in
y = x A (Shoeybi et al. 2019, arXiv:1909.08053); the stored weight is Aᵀ [O, I]. Under sequence
parallelism (Korthikanti et al. 2022, arXiv:2205.05198) hidden states are cut along the tokens
wherever they are not cut along the features.

Parameters start at zero; `mcore_parallel.spec.initialise` or a load by layout fills them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mcore_parallel.collectives import (
    gather_from_group,
    reduce_from_group,
    reduce_scatter_sequence,
    scatter_to_group,
)
from mcore_parallel.group import Group
from mcore_parallel.layout import Box, TensorLayout
from mcore_parallel.protocols import LinearOp, TorchLinear
from mcore_parallel.spec import GradSync, Init, ParamSpec, join
from mcore_parallel.tensor.function import parallel_linear
from mcore_parallel.tensor.partition import (
    Part,
    check_divisible,
    check_parts,
    check_tokens,
    fused_spec,
)

__all__ = ["DEFAULT_INIT", "ColumnParallelLinear", "RowParallelLinear"]

DEFAULT_INIT = Init(kind="normal", std=0.02)
ZEROS = Init(kind="zeros")


class ColumnParallelLinear(nn.Module):
    """y = x Aᵀ + b with the output features cut over `group`: x [T, I] → y [T, O/size].

    Args:
        in_features: I.
        out_features: O over all ranks, which the group's size must divide. Or:
        parts: the output as several fused parts, each cut over the ranks by itself. My rows of the
            weight are [my rows of part 0 | my rows of part 1 | …]. A part with fewer units than
            ranks is held whole by several ranks, and its gradients need a sum over them
            (`ParamSpec.grad_sync`).
        group: the ranks over which to cut; None: this process alone.
        bias: add a bias, cut like the output.
        gather_output: return all O features on every rank, in the order of the parts.
        skip_bias_add: return `(y, bias)` with the bias not added, for a fused operator that
            follows; the bias is shaped like the features of y, or None.
        sequence_parallel: x is [T/size, I], my rows; y still has all T.
        linear: the matrix products; default `TorchLinear`.
        init: initial values of the weight (the bias starts at 0).
        device, dtype: of the parameters.

    Communicates over `group`: forward an all-gather of x under sequence parallelism, backward a sum
    (or reduce-scatter) of the gradient of x; with `gather_output` an all-gather of y.

    Raises:
        ValueError: the features or a part's units cannot be cut over the group.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | None = None,
        *,
        parts: Sequence[Part] | None = None,
        group: Group | None = None,
        bias: bool = False,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        linear: LinearOp | None = None,
        init: Init = DEFAULT_INIT,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if (out_features is None) == (parts is None):
            raise ValueError("ColumnParallelLinear: give either out_features or parts")
        self.group = group or Group.single()
        if out_features is not None:
            check_divisible("ColumnParallelLinear", "out_features", out_features, self.group.size)
            parts = (Part("", out_features),)
        self.fused = out_features is None
        self.parts = tuple(parts or ())
        check_parts("ColumnParallelLinear", self.parts, self.group.size)
        self.in_features = in_features
        self.out_features = sum(part.features for part in self.parts)
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.sequence_parallel = sequence_parallel
        self.linear: LinearOp = linear or TorchLinear()
        self.init = init
        local = sum(self.local_sizes)
        self.weight = nn.Parameter(torch.zeros(local, in_features, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.zeros(local, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)

    @property
    def local_sizes(self) -> tuple[int, ...]:
        """The number of features of each part that this rank holds."""
        return tuple(part.local_features(self.group.size) for part in self.parts)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of an output of this layer as views along its last dimension."""
        whole = [part.features for part in self.parts]
        return torch.split(y, whole if self.gather_output else list(self.local_sizes), dim=-1)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return y [T, O/size] ([T, O] with `gather_output`), or `(y, bias)`; see the class."""
        y = parallel_linear(
            x,
            self.weight,
            None if self.skip_bias_add else self.bias,
            linear=self.linear,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
        )
        if self.gather_output:
            y = self._gather(y)
        if not self.skip_bias_add:
            return y
        bias: Tensor | None = self.bias
        return y, self._gather(bias) if bias is not None and self.gather_output else bias

    def _gather(self, y: Tensor) -> Tensor:
        """All features of the global order from everybody's local ones, along the last dim."""
        size = self.group.size
        y = gather_from_group(y, self.group, dim=-1)
        if size == 1 or len(self.parts) == 1 == self.parts[0].num_replicas(size):
            return y
        pieces = torch.split(y, list(self.local_sizes) * size, dim=-1)
        ordered = [
            pieces[rank * len(self.parts) + i]
            for i, part in enumerate(self.parts)
            for rank in range(0, size, part.num_replicas(size))
        ]
        return torch.cat(ordered, dim=-1)

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """Return the specs of `weight` and `bias`.

        The global tensors are `<prefix>.weight` [O, I] or, for a fused layer, one for each part:
        its name replaces the last component of `prefix`.
        """
        specs = {"weight": self._spec(prefix, "weight", (self.in_features,), self.init, decay=True)}
        if self.bias is not None:
            specs["bias"] = self._spec(prefix, "bias", (), ZEROS, decay=False)
        return specs

    def _spec(
        self, prefix: str, kind: str, columns: tuple[int, ...], init: Init, *, decay: bool
    ) -> ParamSpec:
        parent = prefix.rpartition(".")[0]
        paths = [join(parent, part.name) if self.fused else prefix for part in self.parts]
        named = {join(path, kind): part for path, part in zip(paths, self.parts, strict=True)}
        return fused_spec(named, self.group, columns, init=init, decay=decay)

    def extra_repr(self) -> str:
        """For printing."""
        return (
            f"{self.in_features}, {self.out_features}, tp={self.group.size}, "
            f"sequence_parallel={self.sequence_parallel}"
        )


class RowParallelLinear(nn.Module):
    """y = x Aᵀ + b with the input features cut over `group`: x [T, I/size] → y [T, O].

    Args:
        in_features: I over all ranks, which the group's size must divide.
        out_features: O, whole on every rank.
        group: the ranks over which to cut; None: this process alone.
        bias: add a bias, once, after the sum over the ranks; it is whole on every rank.
        input_is_parallel: x holds my I/size features. Otherwise x is [T, I], the same on every
            rank, and is cut here.
        skip_bias_add: return `(y, bias)` with the bias not added, for a fused operator that
            follows.
        sequence_parallel: y is [T/size, O], my rows; the gradient of the bias is then a partial sum
            over the group (`ParamSpec.grad_sync`).
        linear: the matrix products; default `TorchLinear`.
        init: initial values of the weight (the bias starts at 0).
        device, dtype: of the parameters.

    Communicates over `group`: forward a sum (or reduce-scatter) of y, backward, under sequence
    parallelism, an all-gather of its gradient; an all-gather of the gradient of x when x is not
    parallel.

    Raises:
        ValueError: the features cannot be cut over the group, sequence parallelism is asked for
            with an input that is not parallel, or (when called) its size does not divide T.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group | None = None,
        bias: bool = False,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        linear: LinearOp | None = None,
        init: Init = DEFAULT_INIT,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group = group or Group.single()
        check_divisible("RowParallelLinear", "in_features", in_features, self.group.size)
        if sequence_parallel and not input_is_parallel:
            raise ValueError(
                "RowParallelLinear: sequence_parallel=True needs input_is_parallel=True, since an "
                "input that is whole on every rank is not cut along the tokens"
            )
        self.in_features = in_features
        self.out_features = out_features
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.sequence_parallel = sequence_parallel
        self.linear: LinearOp = linear or TorchLinear()
        self.init = init
        local = in_features // self.group.size
        self.weight = nn.Parameter(torch.zeros(out_features, local, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return y [T, O] ([T/size, O] under sequence parallelism), or `(y, bias)`."""
        size = self.group.size
        if not self.input_is_parallel:
            x = scatter_to_group(x, self.group, dim=-1)
        # Alone, the bias can go into the product; otherwise it would be added once per rank.
        inside = self.bias if size == 1 and not self.skip_bias_add else None
        alone = Group.single()
        y = parallel_linear(x, self.weight, inside, linear=self.linear, group=alone)
        if size > 1 and self.sequence_parallel:
            check_tokens("RowParallelLinear", y.shape[0], size)
            y = reduce_scatter_sequence(y, self.group)
        elif size > 1:
            y = reduce_from_group(y, self.group)
        if self.skip_bias_add:
            return y, self.bias
        return y if self.bias is None or size == 1 else y + self.bias

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """Return the specs of `weight` (global `<prefix>.weight` [O, I]) and `bias` [O]."""
        group = self.group
        local = self.in_features // group.size
        box = Box((0, local * group.rank), (self.out_features, local))
        shape = (self.out_features, self.in_features)
        layout = TensorLayout.box(join(prefix, "weight"), shape, box)
        specs = {"weight": ParamSpec(layout=layout, init=self.init, decay=True)}
        if self.bias is not None:
            whole = TensorLayout.whole(join(prefix, "bias"), (self.out_features,))
            specs["bias"] = ParamSpec(
                layout=whole.replicated(group.rank, group.size),
                init=ZEROS,
                grad_sync=(
                    (GradSync(group=group),) if self.sequence_parallel and group.size > 1 else ()
                ),
                decay=False,
            )
        return specs

    def extra_repr(self) -> str:
        """For printing."""
        return (
            f"{self.in_features}, {self.out_features}, tp={self.group.size}, "
            f"sequence_parallel={self.sequence_parallel}"
        )
