"""Which parameters of a model `fully_shard` cuts, and over whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map_only

from mcore_parallel._torch import forget_groups
from mcore_parallel.data.place import place
from mcore_parallel.data.share import sharding_groups
from mcore_parallel.group import Group
from mcore_parallel.mesh import ParallelMesh
from mcore_parallel.rng import RngKey
from mcore_parallel.spec import ParamSpec

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_Groups: TypeAlias = tuple[Group, Group]


def shard_modules(
    model: nn.Module,
    specs: Mapping[str, ParamSpec],
    mesh: ParallelMesh,
    *,
    units: Iterable[nn.Module],
    methods: Sequence[str],
    key: RngKey | None = None,
) -> list[FSDPModule]:
    """Cut the parameters of `model` in place and return the modules that gather them.

    The parameters of each of `units` are gathered as one, those of no unit by `model` itself; those
    of experts, where their ranks are others than for dense ones, by the largest modules that hold
    nothing else. Those that are trained are stored in fp32 (fp64) and gathered in their own dtype,
    and their gradients are summed in fp32. A parameter stays whole that has no dimension, is dealt
    out over one rank, has another dtype than most of its unit's, is a vector that is not trained
    (its module may change it), or is an expert's beside dense ones in one module.

    methods: of `model`, besides `forward`, that use parameters of no unit.
    key: of the initial values of parameters on meta, which get memory unit by unit, each for as
    long as it takes to cut it.

    Raises:
        ValueError: two units, or a unit and the rest of the model, share a parameter.
    """
    units = list(units)
    _check_apart(model, units)
    cutter = _Cutter(model, specs, mesh, key)
    for unit in units:
        cutter.cut(unit)
    cutter.cut(model)
    if cutter.cut_modules:
        cutter.make_root(model)
        for method in methods:
            register_fsdp_forward_method(model, method)
    return cutter.cut_modules


class _Cutter:
    """Cuts one module after another, inner ones first; each parameter once."""

    def __init__(
        self,
        model: nn.Module,
        specs: Mapping[str, ParamSpec],
        mesh: ParallelMesh,
        key: RngKey | None,
    ) -> None:
        self.mesh = mesh
        self.key = key
        self.cut_modules: list[FSDPModule] = []
        self._left = {param: specs[name] for name, param in model.named_parameters()}
        self._whole: set[nn.Parameter] = set()
        self._meshes: dict[_Groups, DeviceMesh] = {}

    def cut(self, unit: nn.Module) -> None:
        """Cut what is left of a unit's parameters."""
        mine = [param for param in unit.parameters() if param in self._left]
        place(mine, self._left, self.mesh.device, self.key)
        sizes = Counter[torch.dtype]()
        for param in mine:
            sizes[param.dtype] += param.numel()
        for param in mine:
            usual = param.dtype == max(sizes, key=lambda dtype: sizes[dtype])
            # A vector that is not trained may be one that its module changes by itself.
            changes = not param.requires_grad and param.dim() == 1
            if not param.dim() or changes or not usual or self._groups(param)[0].size == 1:
                self._keep_whole(param)
        mine = [param for param in mine if param in self._left]
        apart = {param for param in mine if self._is_apart(param)}
        for module in self._largest(unit, apart):
            self._shard(module, apart.intersection(module.parameters()))
        for param in apart.intersection(self._left):
            self._keep_whole(param)
        rest = {param for param in mine if param in self._left}
        if rest:
            self._shard(unit, rest)

    def make_root(self, model: nn.Module) -> None:
        """Let `model` order what the units do, also when it has no parameters of its own."""
        if not isinstance(model, FSDPModule):
            self.cut_modules.append(self._fully_shard(model, next(iter(self._meshes.values()))))

    def _groups(self, param: nn.Parameter) -> _Groups:
        return sharding_groups(self._left[param], self.mesh)

    def _is_apart(self, param: nn.Parameter) -> bool:
        """Whether it is an expert's whose shares lie on other ranks than dense ones."""
        dense = self.mesh.dp_shard, self.mesh.dp_copies
        both = zip(self._groups(param), dense, strict=True)
        return any(group.ranks != other.ranks for group, other in both)

    def _keep_whole(self, param: nn.Parameter) -> None:
        self._whole.add(param)
        del self._left[param]

    def _largest(self, module: nn.Module, wanted: set[nn.Parameter]) -> Iterator[nn.Module]:
        """Yield the largest callable modules in `module` all of whose parameters are wanted."""
        here = {param for param in module.parameters() if param in self._left}
        if not here & wanted:
            return
        if here <= wanted and not isinstance(module, _CONTAINERS):
            yield module
            return
        for child in module.children():
            yield from self._largest(child, wanted)

    def _shard(self, module: nn.Module, params: set[nn.Parameter]) -> None:
        groups = self._groups(next(iter(params)))
        if groups not in self._meshes:
            self._meshes[groups] = device_mesh(*groups, self.mesh)
        dims = {param: _dim_to_cut(param, self._left[param], groups[0].size) for param in params}
        dtype = next(iter(params)).dtype
        for param in params:
            stored = torch.promote_types(dtype, torch.float32) if param.requires_grad else dtype
            param.data = param.data.to(stored).contiguous()  # torch cuts no others
        cut = self._fully_shard(module, self._meshes[groups], dtype=dtype, dims=dims)
        self.cut_modules.append(cut)
        for param in params:
            del self._left[param]

    def _fully_shard(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        *,
        dtype: torch.dtype = torch.float32,
        dims: Mapping[nn.Parameter, int] | None = None,
    ) -> FSDPModule:
        stored = torch.promote_types(dtype, torch.float32)
        module.register_forward_hook(_without_views)  # before torch adds its own
        ignored = self._whole | ({*self._left} - {*(dims or {})})
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=None if dtype == stored else dtype,
                reduce_dtype=stored,
                cast_forward_inputs=False,
            ),
            shard_placement_fn=lambda param: Shard((dims or {}).get(param, 0)),
            ignored_params=ignored,
        )
        assert isinstance(module, FSDPModule)
        # Gradients are summed, never averaged, and by sums that every backend has.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        return module


class _NoView(torch.autograd.Function):
    """The identity; what it returns is no view to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """Return a module's output such that it may be changed in place.

    torch hooks outputs, so as to gather parameters for the backward pass. An operator that changes
    a view in place puts another node in the place of the one with the hook, of which torch warns.
    """
    return tree_map_only(Tensor, _owned, output)


def _owned(x: Tensor) -> Tensor:
    if not (x.requires_grad and x._is_view()):
        return x
    return cast(Tensor, _NoView.apply(x))  # type: ignore[no-untyped-call]


def device_mesh(shard: Group, copies: Group, mesh: ParallelMesh) -> DeviceMesh:
    """Return torch's view of the ranks that hold a share each, times those that hold the same."""
    kind = mesh.device.type
    # torch takes meshes of one shape and equal names for one mesh and looks up what it knows of the
    # first, which may be closed by now: so these are the names of the groups.
    if copies.size == 1:
        group = shard.process_group
        view = DeviceMesh.from_group(group, kind, mesh_dim_names=(group.group_name,))
        shard.when_closed(partial(forget_groups, view))
        return view
    ranks = mesh.world.ranks
    table = [
        [ranks[ranks.index(a) + ranks.index(b) - mesh.rank] for b in shard.ranks]
        for a in copies.ranks
    ]
    groups = [copies.process_group, shard.process_group]
    names = tuple(group.group_name for group in groups)
    view = DeviceMesh.from_group(groups, kind, torch.tensor(table), mesh_dim_names=names)
    shard.when_closed(partial(forget_groups, view))
    return view


def _dim_to_cut(param: nn.Parameter, spec: ParamSpec, size: int) -> int:
    """The first dimension that ranks can share equally, else 0.

    0 too where ranges of the flattened parameter are summed over other groups: a slice along
    another dimension is no range of it.
    """
    even = (dim for dim, length in enumerate(param.shape) if length % size == 0)
    return 0 if spec.grad_sync else next(even, 0)


def _check_apart(model: nn.Module, units: Sequence[nn.Module]) -> None:
    homes: dict[nn.Parameter, tuple[str, int]] = {}
    inside = {module: i for i, unit in enumerate(units) for module in unit.modules()}
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            full, home = f"{path}.{name}", inside.get(module, -1)
            other, at = homes.setdefault(param, (full, home))
            if at != home:
                raise ValueError(
                    f"{other} and {full} are one parameter, and not of one unit: leave the modules "
                    f"that share it out of the units"
                )
