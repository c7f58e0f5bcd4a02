"""The dense feed-forward part. T tokens, H hidden, F inner width."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from mcore_models.common.batch import TokenContext
from mcore_models.common.builder import BuildContext
from mcore_models.config import ModelConfig
from mcore_parallel import Init
from mcore_parallel.tensor import ColumnParallelLinear, Part, RowParallelLinear


class MLP(nn.Module):
    """down(act(up(x))): [T, H] to [T, H], split over the inner width F.

    SwiGLU (Shazeer, 2020) computes silu(gate(x)) · up(x) from one fused weight, whose global names
    are `mlp.gate.weight` and `mlp.up.weight`. Communicates over the tensor-parallel group.
    """

    parallel = True

    def __init__(self, config: ModelConfig, build: BuildContext, layer_index: int) -> None:
        super().__init__()
        width = config.mlp_size
        init = Init(kind="normal", std=config.init_std)
        gated = config.activation == "swiglu"
        parts = (Part("gate", width), Part("up", width)) if gated else (Part("up", width),)
        self._enter = "gate_up" if gated else "up"
        self.add_module(
            self._enter,
            ColumnParallelLinear(
                config.hidden_size,
                parts=parts,
                group=build.tp,
                bias=config.linear_bias,
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
            bias=config.linear_bias,
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
    if config.activation == "swiglu":
        return build.kernels.swiglu
    approximate = "tanh" if config.activation == "gelu_tanh" else "none"
    return partial(build.kernels.gelu, approximate=approximate)
