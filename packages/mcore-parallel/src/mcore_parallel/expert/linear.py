"""Linear layers of experts: dealt out over `ep`, and each cut over `etp` by columns or by rows.

R rows, sorted by expert, E experts, e = E / ep of them here, I input and O output features. Global
tensors are stacked: `[E, O, I]`. Parameters start at zero, as those of the tensor-parallel layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mcore_parallel.expert.dispatch import check_experts
from mcore_parallel.expert.grouped import GroupedLinearOp, SequentialLinear, grouped_linear
from mcore_parallel.expert.rows_of import Counts
from mcore_parallel.group import Group
from mcore_parallel.layout import Box, TensorLayout
from mcore_parallel.spec import GradSync, Init, ParamSpec, join
from mcore_parallel.tensor.linear import DEFAULT_INIT, ZEROS
from mcore_parallel.tensor.partition import Part

__all__ = ["ExpertColumnLinear", "ExpertRowLinear"]


class _ExpertLinear(nn.Module):
    """The weight [e, O here, I here] and bias [e, O here] of this rank's experts."""

    def __init__(
        self,
        num_experts: int,
        features: tuple[int, int],
        *,
        ep: Group | None,
        etp: Group | None,
        bias: bool,
        linear: GroupedLinearOp | None,
        init: Init,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.ep = ep or Group.single()
        self.etp = etp or Group.single()
        check_experts(type(self).__name__, num_experts, self.ep)
        self.num_experts = num_experts
        self.local_experts = num_experts // self.ep.size
        self.linear: GroupedLinearOp = linear or SequentialLinear()
        self.init = init
        shape = (self.local_experts, *features)
        self.weight = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.zeros(shape[:2], device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)

    def _layout(
        self, name: str, features: tuple[int, ...], dim: int, start: int, size: int
    ) -> TensorLayout:
        """My experts' part `[start, start + size)` along `dim` of the global `[E, *features]`."""
        first = self.ep.rank * self.local_experts
        corner, shape = [first, *(0 for _ in features)], [self.local_experts, *features]
        corner[1 + dim], shape[1 + dim] = start, size
        return TensorLayout.box(
            name, (self.num_experts, *features), Box(tuple(corner), tuple(shape))
        )

    def _check_cut(self, what: str, count: int) -> None:
        if count < 1 or count % self.etp.size:
            fitting = [str(d) for d in range(1, count + 1) if count % d == 0]
            raise ValueError(
                f"{type(self).__name__}: {what} of {count} features cannot be cut over "
                f"etp={self.etp.size} ranks; valid etp: {', '.join(fitting)}"
            )

    def extra_repr(self) -> str:
        """For printing."""
        return f"{self.num_experts} experts, ep={self.ep.size}, etp={self.etp.size}"


class ExpertColumnLinear(_ExpertLinear):
    """y_i = x_i A_iᵀ + b_i with output features cut over `etp`: x [R, I] → y [R, O/etp].

    My rows of an expert's weight are [my rows of part 0 | my rows of part 1 | …].

    Args:
        num_experts: E.
        in_features: I.
        parts: the output in parts, each cut over `etp` by itself; the global tensor of a part is
            named after it, in place of this module.
        ep, etp: the ranks over which experts are dealt out and cut; None: this process alone.
        bias: add a bias, cut like the output.
        linear: the products; default one expert after another.
        init: initial values of the weight (the bias starts at 0).
        device, dtype: of the parameters.

    Raises:
        ValueError: the experts cannot be dealt out over `ep`, or a part not cut over `etp`.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        parts: Sequence[Part],
        *,
        ep: Group | None = None,
        etp: Group | None = None,
        bias: bool = False,
        linear: GroupedLinearOp | None = None,
        init: Init = DEFAULT_INIT,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        cuts = 1 if etp is None else etp.size
        super().__init__(
            num_experts,
            (sum(part.features for part in parts) // cuts, in_features),
            ep=ep,
            etp=etp,
            bias=bias,
            linear=linear,
            init=init,
            device=device,
            dtype=dtype,
        )
        self.parts = tuple(parts)
        self.in_features = in_features
        for part in self.parts:
            self._check_cut(f"part {part.name!r}", part.features)

    def forward(self, x: Tensor, counts: Counts) -> Tensor:
        """Return y [R, O/etp] for x [R, I], the rows of my experts, `counts[i]` of expert i."""
        return grouped_linear(x, self.weight, self.bias, counts, op=self.linear)

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """Return the specs of `weight` (global [E, O, I] for each part) and `bias` [E, O]."""
        specs = {"weight": self._spec(prefix, "weight", (self.in_features,), self.init, decay=True)}
        if self.bias is not None:
            specs["bias"] = self._spec(prefix, "bias", (), ZEROS, decay=False)
        return specs

    def _spec(
        self, prefix: str, kind: str, columns: tuple[int, ...], init: Init, *, decay: bool
    ) -> ParamSpec:
        parent = prefix.rpartition(".")[0]
        layouts = []
        for part in self.parts:
            size = part.features // self.etp.size
            name = join(join(parent, part.name), kind)
            start = size * self.etp.rank
            layouts.append(self._layout(name, (part.features, *columns), 0, start, size))
        layout = TensorLayout.concat(layouts, dim=1)
        return ParamSpec(layout=layout, init=init, expert=True, decay=decay)


class ExpertRowLinear(_ExpertLinear):
    """y_i = x_i A_iᵀ + b_i with input features cut over `etp`: x [R, I/etp] → y [R, O].

    y is this rank's share of a sum over `etp`, which is left to whoever moves the rows on
    (`Dispatched.combine`); the bias, whole on every rank of it, is added by the first.

    Args: as `ExpertColumnLinear`; in_features is I over all ranks, out_features O.

    Raises:
        ValueError: the experts cannot be dealt out over `ep`, or the input not cut over `etp`.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        ep: Group | None = None,
        etp: Group | None = None,
        bias: bool = False,
        linear: GroupedLinearOp | None = None,
        init: Init = DEFAULT_INIT,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_experts,
            (out_features, in_features // (1 if etp is None else etp.size)),
            ep=ep,
            etp=etp,
            bias=bias,
            linear=linear,
            init=init,
            device=device,
            dtype=dtype,
        )
        self.in_features = in_features
        self.out_features = out_features
        self._check_cut("input", in_features)

    def forward(self, x: Tensor, counts: Counts) -> Tensor:
        """Return my share of y [R, O] for x [R, I/etp], `counts[i]` rows of expert i."""
        bias = self.bias if self.etp.rank == 0 else None
        return grouped_linear(x, self.weight, bias, counts, op=self.linear)

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """Return the specs of `weight` (global `<prefix>.weight` [E, O, I]) and `bias` [E, O]."""
        etp, size = self.etp, self.in_features // self.etp.size
        features = (self.out_features, self.in_features)
        layout = self._layout(join(prefix, "weight"), features, 1, size * etp.rank, size)
        specs = {"weight": ParamSpec(layout=layout, init=self.init, expert=True, decay=True)}
        if self.bias is not None:
            name, out = join(prefix, "bias"), self.out_features
            specs["bias"] = ParamSpec(
                layout=self._layout(name, (out,), 0, 0, out).replicated(etp.rank, etp.size),
                init=ZEROS,
                grad_sync=(GradSync(group=etp),) if etp.size > 1 else (),
                expert=True,
                decay=False,
            )
        return specs
