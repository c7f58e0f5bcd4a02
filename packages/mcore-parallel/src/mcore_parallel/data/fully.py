"""Gradients, and the slices of parameters, of a model that `fully_shard` has cut."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from mcore_parallel.collectives import Work
from mcore_parallel.data.ddp import GradientBuckets, check_specs, sum_ranges
from mcore_parallel.data.modules import shard_modules
from mcore_parallel.data.share import Piece, Share, Slot, grads_of, sharding_groups, split_syncs
from mcore_parallel.layout import LayoutTensor, TensorLayout
from mcore_parallel.mesh import ParallelMesh
from mcore_parallel.rng import RngKey
from mcore_parallel.spec import ParamSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """This rank's slice of a parameter along one dimension; possibly empty.

    local: the slice (a view that can be written). start: of the slice, along `dim`. layout: of the
    slice, with all replicas counted.
    """

    local: Tensor
    dim: int
    start: int
    layout: TensorLayout

    @classmethod
    def of(cls, param: DTensor, spec: ParamSpec, mesh: ParallelMesh) -> Cut:
        """Return what this rank holds of a parameter."""
        shard, copies = sharding_groups(spec, mesh)
        placement = param.placements[-1]
        assert isinstance(placement, Shard)
        length = param.shape[placement.dim]
        rows = -(-length // shard.size)  # of each rank but the last ones
        start, stop = (min(rows * rank, length) for rank in (shard.rank, shard.rank + 1))
        layout = spec.layout.replicated(copies.rank, copies.size)
        return cls(
            local=param.to_local().detach(),
            dim=placement.dim,
            start=start,
            layout=layout.slice(placement.dim, start, stop),
        )


class ParameterShare:
    """What this rank owns of one parameter: its slice. A `Share`.

    The slice is the master: in fp32 (fp64), whatever the dtype in which the parameter is gathered
    and used. Backward passes add to its gradient's buffer.
    """

    keeps_shape = False

    def __init__(self, slot: Slot, cut: Cut) -> None:
        self.slots = (slot,)
        # A slice along the first dimension is a range of the flattened parameter. Along others it
        # is counted from 0: nobody asks for ranges then (`grad_sync`, see `shard_modules`).
        # (Without slicing the DTensor: torch would gather it over a mesh that equals this one, and
        # that may be an earlier one whose groups are gone.)
        first = cut.start * math.prod(slot.param.shape[1:]) if cut.dim == 0 else 0
        self.owned = first, first + cut.local.numel()
        self.owned_values = cut.local.view(-1)
        self.owned_grads = torch.zeros_like(self.owned_values)
        self.pieces: tuple[Piece, ...] = ()
        if cut.local.numel():
            start, stop = self.owned
            layout = cut.layout.reshaped((stop - start,))
            self.pieces = (Piece(slot=slot, start=start, stop=stop, at=start, layout=layout),)
        param = slot.param
        assert isinstance(param, DTensor)
        self._grad = DTensor.from_local(
            self.owned_grads.view(cut.local.shape),
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )

    def gather(self) -> Work | None:
        """Nothing to start: modules gather their parameters when they are called."""
        return None

    def zero(self) -> None:
        """Set the gradient to zero, and let backward passes add to it."""
        self.owned_grads.zero_()
        self.slots[0].param.grad = self._grad


class FullySharded(GradientBuckets):
    """`GradientBuckets` for a model whose parameters are sharded too; made by `data_parallel`.

    Every backward pass is reduced, as with sharding "gradients", while it runs. Parameters that
    `shard_modules` does not cut lie in buckets.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: Mapping[str, ParamSpec],
        mesh: ParallelMesh,
        *,
        units: Iterable[nn.Module],
        methods: Sequence[str],
        key: RngKey | None,
    ) -> None:
        check_specs(dict(model.named_parameters()), specs)
        self._sharded = shard_modules(model, specs, mesh, units=units, methods=methods, key=key)
        params = dict(model.named_parameters())
        super().__init__(params, specs, mesh)
        self._cuts = {
            name: Cut.of(param, specs[name], mesh)
            for name, param in params.items()
            if isinstance(param, DTensor)
        }
        self._shares = tuple(self._make_shares(params))

    def _make_shares(self, params: Mapping[str, nn.Parameter]) -> list[ParameterShare]:
        shares = []
        for index, (name, param) in enumerate(params.items()):
            if name not in self._cuts or not param.requires_grad:
                continue
            partial, tied = split_syncs(self.specs[name], self.mesh)
            slot = Slot(
                name=name,
                index=index,
                param=param,
                spec=self.specs[name],
                offset=0,
                partial=partial,
                tied=tied,
            )
            shares.append(ParameterShare(slot, self._cuts[name]))
        return shares

    @staticmethod
    def _check_sharding(mesh: ParallelMesh) -> None:
        assert mesh.config.sharding == "parameters"

    @staticmethod
    def _is_cut(param: nn.Parameter) -> bool:
        return isinstance(param, DTensor)

    @property
    def shares(self) -> tuple[Share, ...]:
        """What this rank owns: buckets, then parameters in order of registration."""
        return *self.buckets, *self._shares

    def zero(self) -> None:
        """Set all gradients to zero and begin a new accumulation."""
        super().zero()
        for share in self._shares:
            share.zero()

    def _sum_owned(self) -> None:
        super()._sum_owned()
        for kind in ("partial", "tied"):
            sum_ranges(
                (sync.group, slot.spec, sync, grads_of(share, *slot.range_of(sync)))
                for share in self._shares
                for slot in share.slots
                for sync in getattr(slot, kind)
            )

    def parameters(self) -> dict[str, LayoutTensor]:
        """Return what this rank holds of every parameter: slices of those that are cut."""
        cuts = {name: LayoutTensor(cut.local, cut.layout) for name, cut in self._cuts.items()}
        return super().parameters() | cuts

    def written(self) -> None:
        """Drop parameters that are still gathered."""
        for module in self._sharded:
            module.reshard()

    def close(self) -> None:
        """Give up the gradients; the parameters stay cut."""
        super().close()
        for share in self._shares:
            share.slots[0].param.grad = None
