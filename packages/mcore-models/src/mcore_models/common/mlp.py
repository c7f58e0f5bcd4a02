"""The dense feed-forward part. T tokens, H hidden, F inner width."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from mcore_models.common.builder import BuildContext
from mcore_models.common.context import TokenContext
from mcore_models.config import GATES, ModelConfig
from mcore_parallel import Init
from mcore_parallel.tensor import ColumnParallelLinear, Part, RowParallelLinear


class MLP(nn.Module):
    """down(act(up(x))): [T, H] to [T, H], split over the inner width F.

    Gated activations (Shazeer, 2020) compute f(gate(x)) · up(x) from one fused weight, whose global
    names are `mlp.gate.weight` and `mlp.up.weight`. Communicates over the tensor-parallel group.
    """

    parallel = True

    def __init__(self, config: ModelConfig, build: BuildContext, layer_index: int) -> None:
        super().__init__()
        width = config.mlp_size
        init = Init(kind="normal", std=config.init_std)
        parts = [Part("up", width)]
        if config.gated:
            parts.insert(0, Part("gate", width))
        self._enter = "gate_up" if config.gated else "up"
        self.add_module(
            self._enter,
            ColumnParallelLinear(
                config.hidden_size,
                parts=parts,
                group=build.tp,
                bias=config.ffn_bias,
                sequence_parallel=build.sequence_parallel,
                linear=build.kernels.linear,
                init=init,
                device=build.device,
                dtype=build.dtype,
            ),
        )
        self.down = RowParallelLinear(
            width,
            config.hidden_size,
            group=build.tp,
            bias=config.ffn_bias,
            sequence_parallel=build.sequence_parallel,
            linear=build.kernels.linear,
            init=Init(kind="normal", std=config.output_init_std),
            device=build.device,
            dtype=build.dtype,
        )
        self._activation = build_activation(config, build)

    def forward(self, hidden: Tensor, context: TokenContext) -> Tensor:
        """[T, H] to [T, H]."""
        inner = self.get_submodule(self._enter)(hidden)
        out: Tensor = self.down(self._activation(inner))
        return out


def build_activation(config: ModelConfig, build: BuildContext) -> Callable[[Tensor], Tensor]:
    """The activation that `config` names; a gated one takes [gate | up] and halves the width."""
    name, limit, offset = config.activation, config.glu_limit, config.glu_offset
    if name == "swiglu" and limit is None and not offset:
        return build.kernels.swiglu
    if config.gated:
        glu = build.kernels.glu
        return partial(glu, activation=GATES[name], limit=limit, offset=offset)
    if name in {"gelu", "gelu_tanh"}:
        approximate = "tanh" if name == "gelu_tanh" else "none"
        return partial(build.kernels.gelu, approximate=approximate)
    return partial(build.kernels.activation, activation=name)
