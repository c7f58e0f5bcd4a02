"""Linear layers that every tensor-parallel rank holds whole. t tokens with hidden states here."""

from collections.abc import Mapping
from dataclasses import replace

from mcore_models.common.builder import BuildContext
from mcore_parallel import GradSync, Group, Init, ParamSpec
from mcore_parallel.tensor import ColumnParallelLinear, Part


class WholeLinear(ColumnParallelLinear):
    """A projection of the tokens whose hidden states this rank has: [t, I] to [t, O].

    Under sequence parallelism ranks project different tokens, so that its gradient is a share of
    the sum over the tensor-parallel group; without it they all do the same.

    parts: features of each of several projections in one local weight, by name; their global names
    replace the last component of the module's (`ColumnParallelLinear`).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | None = None,
        *,
        build: BuildContext,
        std: float,
        parts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            parts=None if parts is None else [Part(*part) for part in parts.items()],
            group=Group.single(),
            linear=build.kernels.linear,
            init=Init(kind="normal", std=std),
            device=build.device,
            dtype=build.dtype,
        )
        self._tp = build.tp
        self._is_cut = build.sequence_parallel

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """The spec of `weight`, whole on every rank."""
        tp = self._tp
        return {
            name: replace(
                spec,
                layout=spec.layout.replicated(tp.rank, tp.size),
                grad_sync=(GradSync(group=tp),) if self._is_cut else (),
            )
            for name, spec in super().param_specs(prefix).items()
        }
