"""One layer with experts, small, in fp64, the same under every mesh."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mcore_kernels import KernelConfig, Kernels, Target
from mcore_models import (
    AuxiliaryLosses,
    BuildContext,
    GlobalCounts,
    ModelConfig,
    MoEConfig,
    TokenBatch,
    TokenContext,
    llama,
)
from mcore_models.common import MoE
from mcore_models.common.moe import auxiliary_names
from mcore_parallel import ParallelMesh, RngKey, initialise, param_specs

H, E, F, K = 8, 4, 6, 2
MOE = MoEConfig(num_experts=E, top_k=K, expert_ffn_size=F, aux_loss_coefficient=0.1)
CONFIG = llama(vocab_size=31, hidden_size=H, num_layers=2, num_heads=2, init_std=0.4)
CONFIG = replace(CONFIG, moe=MOE)


def changed(**fields: Any) -> ModelConfig:
    return replace(CONFIG, moe=replace(MOE, **fields))


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make(config: ModelConfig, mesh: ParallelMesh | None = None, **options: Any) -> MoE:
    """The layer; what routers learn from counts is not zero."""
    mesh = mesh or ParallelMesh.single()
    kernels = Kernels(KernelConfig(), Target.of("cpu"))
    build = BuildContext(mesh=mesh, kernels=kernels, dtype=torch.float64)
    layer = MoE(config, build, 0, **options)
    initialise(dict(layer.named_parameters()), specs_of(layer, mesh), RngKey(2))
    router = layer.router
    with torch.no_grad():
        if router.correction is not None:
            router.correction += torch.linspace(-0.1, 0.1, len(router.correction))
        if router.load is not None:
            router.load += torch.arange(1, len(router.load) + 1) / sum(range(len(router.load) + 1))
        if router.bias is not None:
            router.bias += torch.linspace(0.3, -0.3, len(router.bias))
    return layer


def specs_of(layer: MoE, mesh: ParallelMesh) -> Any:
    sequence_parallel = mesh.config.sequence_parallel
    return param_specs(layer, tp=mesh.tp, sequence_parallel=sequence_parallel, prefix="moe")


def batch_of(mask: Tensor, bounds: list[int], rows: Tensor | None = None) -> TokenBatch:
    """Documents with these bounds and this loss mask [T], of tokens that nobody reads."""
    index = torch.arange(mask.numel())
    starts = torch.tensor(bounds)[torch.searchsorted(torch.tensor(bounds), index, right=True) - 1]
    return TokenBatch(
        tokens=torch.zeros_like(index),
        positions=index - starts,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_seqlen=max((b - a for a, b in pairwise(bounds)), default=0),
        loss_mask=mask,
        rows=index if rows is None else rows,
    )


def context_of(config: ModelConfig, batch: TokenBatch, tokens: float) -> TokenContext:
    auxiliary = AuxiliaryLosses(GlobalCounts(tokens=tokens), auxiliary_names(config.moe))
    return TokenContext(batch=batch, auxiliary=auxiliary, rng=RngKey(9))


def plain_expert(layer: MoE, expert: int, token: Tensor) -> Tensor:
    gates, ups = layer.experts.get_parameter("gate_up.weight").chunk(2, 1)
    inner = torch.nn.functional.silu(gates[expert] @ token) * (ups[expert] @ token)
    out: Tensor = layer.experts.down.weight[expert] @ inner
    return out
