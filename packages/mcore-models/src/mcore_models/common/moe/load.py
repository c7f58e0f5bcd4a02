"""What a step teaches routers: how it was spread over experts, all ranks and micro-batches."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mcore_models.common.auxiliary import AuxiliaryLosses
from mcore_models.common.moe.router import Router
from mcore_parallel import ParallelMesh, all_reduce


@dataclass(frozen=True, kw_only=True)
class ExpertLoads:
    """How many tokens of the global batch chose each expert: [E] fp64 by layer of this stage."""

    by_layer: Mapping[int, Tensor] = field(default_factory=dict)

    def imbalance(self, mesh: ParallelMesh, layers: Iterable[int]) -> dict[str, float]:
        """This rank's share of how uneven these layers of the model are, by name.

        Over the mesh the shares add up to the number of tokens of the fullest expert as a multiple
        of the mean: 1 at best, E at worst, 0 for a layer in which nothing was chosen.
        """
        shares = dict.fromkeys((f"moe_imbalance_{layer}" for layer in layers), 0.0)
        if mesh.tp.rank == 0 and mesh.dp_cp.rank == 0:
            for layer, counts in self.by_layer.items():
                if counts.any():
                    shares[f"moe_imbalance_{layer}"] = float(counts.max() / counts.mean())
        return shares


def expert_loads(model: nn.Module, auxiliary: AuxiliaryLosses, mesh: ParallelMesh) -> ExpertLoads:
    """Return the loads of the layers of this stage, after a step's backward passes.

    `auxiliary` is what these were given. The same on every rank of a pipeline stage, all of which
    call it: it reduces over tp, dp and cp.
    """
    routers = _routers(model)
    if not routers:
        return ExpertLoads()
    nothing = [
        torch.zeros(router.moe.num_experts, dtype=torch.float64, device=router.weight.device)
        for router in routers.values()
    ]
    counts = [
        auxiliary.choices.get(layer, zeros) for layer, zeros in zip(routers, nothing, strict=True)
    ]
    # To the host, once for all layers.
    totals = all_reduce(all_reduce(torch.stack(counts), mesh.tp), mesh.dp_cp).cpu()
    return ExpertLoads(by_layer=dict(zip(routers, totals, strict=True)))


@torch.no_grad()
def adapt_routers(model: nn.Module, loads: ExpertLoads) -> None:
    """Adjust corrections and remembered loads of routers by those of a step, once after it."""
    for layer, router in _routers(model).items():
        load = loads.by_layer.get(layer)
        if load is None or not load.any():
            continue
        if router.correction is not None and router.moe.correction_rate:
            steps = (load.mean() - load).sign() * router.moe.correction_rate
            router.correction.add_(steps.to(router.correction))
        if router.load is not None:
            router.load.copy_(load / load.sum())


def _routers(model: nn.Module) -> dict[int, Router]:
    found = {m.layer_index: m for m in model.modules() if isinstance(m, Router)}
    return dict(sorted(found.items()))
