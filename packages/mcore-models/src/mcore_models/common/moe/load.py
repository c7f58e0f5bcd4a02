"""What a step teaches routers: how it was spread over experts, all ranks and micro-batches."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mcore_models.common.auxiliary import AuxiliaryLosses
from mcore_models.common.moe.router import Router
from mcore_parallel import ParallelMesh, all_reduce


@dataclass(frozen=True, kw_only=True)
class ExpertLoads:
    """How many tokens of the global batch chose each expert: [E] fp64 by layer of this stage."""

    by_layer: Mapping[int, Tensor]

    def imbalance(self) -> dict[int, float]:
        """For each layer the tokens of its fullest expert, as a multiple of the mean; 1 at best."""
        return {
            layer: float(counts.max() / counts.mean()) if counts.any() else 1.0
            for layer, counts in self.by_layer.items()
        }


@torch.no_grad()
def adapt_routers(model: nn.Module, auxiliary: AuxiliaryLosses, mesh: ParallelMesh) -> ExpertLoads:
    """Return the loads of a step, and adjust corrections and remembered loads of routers by them.

    Once, after the step's backward passes; `auxiliary` is what they were given. The same on every
    rank of a pipeline stage, all of which call it: it reduces over tp, dp and cp.
    """
    routers = {m.layer_index: m for m in model.modules() if isinstance(m, Router)}
    if not routers:
        return ExpertLoads(by_layer={})
    counts = []
    for layer, router in sorted(routers.items()):
        found = auxiliary.choices.get(layer)
        experts = router.moe.num_experts
        nothing = torch.zeros(experts, dtype=torch.float64, device=router.weight.device)
        counts.append(nothing if found is None else found)
    totals = all_reduce(all_reduce(torch.stack(counts), mesh.tp), mesh.dp_cp)
    loads = dict(zip(sorted(routers), totals, strict=True))
    for layer, load in loads.items():
        _adapt(routers[layer], load)
    return ExpertLoads(by_layer=loads)


def _adapt(router: Router, load: Tensor) -> None:
    rate = router.moe.correction_rate
    if not load.any():
        return
    if router.correction is not None and rate:
        steps = (load.mean() - load).sign() * rate
        router.correction.add_(steps.to(router.correction.dtype))
    if router.load is not None:
        router.load.copy_(load / load.sum())
