"""Experts, and what stands beside and around them.

E experts, F inner width of an expert, H hidden, L the width at which experts work, R rows that
reach the experts of this rank.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_models.common.builder import BuildContext
from mcore_models.common.mlp import build_activation
from mcore_models.config import ModelConfig
from mcore_models.parts import MoEConfig
from mcore_parallel import GradSync, Group, Init, ParamSpec
from mcore_parallel.expert import (
    ExpertColumnLinear,
    ExpertRowLinear,
    PermuteOp,
    RowOrder,
)
from mcore_parallel.expert.rows_of import Counts
from mcore_parallel.tensor import ColumnParallelLinear, Part


class Experts(nn.Module):
    """This rank's experts, MLPs with the model's activation: rows [R, L] to [R, L].

    With expert-tensor parallelism the result is a share of a sum, which `Dispatched.combine` makes.
    Global names are `experts.{gate,up,down}.weight`, stacked on a leading expert axis.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig, build: BuildContext) -> None:
        super().__init__()
        width, hidden = moe.expert_ffn_size, moe.latent_size or config.hidden_size
        parts = [Part("up", width)]
        if config.gated:
            parts.insert(0, Part("gate", width))
        self._enter = "gate_up" if config.gated else "up"
        linear = build.kernels.grouped_linear
        enter = ExpertColumnLinear(
            moe.num_experts,
            hidden,
            parts,
            ep=build.mesh.ep,
            etp=build.mesh.etp,
            bias=config.expert_bias,
            linear=linear,
            init=Init(kind="normal", std=config.init_std),
            device=build.device,
            dtype=build.dtype,
        )
        self.add_module(self._enter, enter)
        self.down = ExpertRowLinear(
            moe.num_experts,
            width,
            hidden,
            ep=build.mesh.ep,
            etp=build.mesh.etp,
            bias=config.expert_bias,
            linear=linear,
            init=Init(kind="normal", std=config.output_init_std),
            device=build.device,
            dtype=build.dtype,
        )
        self._activation = build_activation(config, build)

    def forward(self, rows: Tensor, counts: Counts) -> Tensor:
        """Rows sorted by expert, `counts[i]` of the i-th expert here (see `Dispatched.counts`)."""
        inner = self.get_submodule(self._enter)(rows, counts)
        out: Tensor = self.down(self._activation(inner), counts)
        return out


def padded_experts(
    experts: nn.Module, rows: Tensor, counts: Counts, size: int, permute: PermuteOp
) -> Tensor:
    """Run experts on `size` rows each: theirs, and then zeros; return the outputs of theirs.

    Every product then has the same shape, whatever the router chose. Counts are read on the host,
    as the size was.
    """
    counts = counts.tolist() if isinstance(counts, Tensor) else counts
    assert size >= max(counts), f"{max(counts)} rows for an expert with room for {size}"
    starts = [size * i for i in range(len(counts))]
    places = [torch.arange(start, start + n) for start, n in zip(starts, counts, strict=True)]
    order = RowOrder.of(torch.cat(places).to(rows.device), size * len(counts))
    outputs = experts(permute.unpermute(rows, None, order), (size,) * len(counts))
    return permute.permute(outputs, order)


class SharedGate(nn.Module):
    """The weight of the shared experts for each token: sigmoid(hidden · w), [t, H] to [t, 1]."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        self.param_init = {"weight": Init(kind="normal", std=config.init_std)}
        self.weight = nn.Parameter(
            torch.empty(1, config.hidden_size, dtype=build.dtype, device=build.device)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[t, H] to [t, 1]."""
        return F.linear(hidden, self.weight).sigmoid()


class LatentLinear(ColumnParallelLinear):
    """A projection of the tokens that this rank routes, whole on every rank.

    Ranks of the tensor-parallel group project different tokens, so that its gradient is a share of
    the sum over that group.
    """

    def __init__(self, sizes: tuple[int, int], std: float, build: BuildContext) -> None:
        super().__init__(
            *sizes,
            group=Group.single(),
            linear=build.kernels.linear,
            init=Init(kind="normal", std=std),
            device=build.device,
            dtype=build.dtype,
        )
        self._tp = build.tp

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """The spec of `weight`, global `<prefix>.weight` [out, in]."""
        tp = self._tp
        return {
            name: replace(
                spec,
                layout=spec.layout.replicated(tp.rank, tp.size),
                grad_sync=(GradSync(group=tp),) if tp.size > 1 else (),
            )
            for name, spec in super().param_specs(prefix).items()
        }
