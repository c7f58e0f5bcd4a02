"""What a model says about each parameter: layout, initial values and gradient synchronisation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, cast, runtime_checkable

import torch
from torch import nn

from mcore_parallel.layout import Box, Fragment, TensorLayout, row_major_strides
from mcore_parallel.rng import RngKey, counter_normal, counter_uniform

if TYPE_CHECKING:
    from mcore_parallel.group import Group

_FILL_ELEMENTS = 1 << 22  # elements whose indices and values are in memory at one time


@dataclass(frozen=True, kw_only=True)
class Init:
    """The distribution of a parameter's initial values.

    `normal` has mean 0 and deviation `std`; `uniform` lies in `[low, high)`, and so does
    `log_uniform`, whose logarithm is uniform; `constant` is `value`. With `through` the
    distribution is that of exp or softplus of the parameter, as for a rate that a layer keeps as
    its logarithm: the parameter is the inverse of what is drawn.
    """

    kind: Literal["normal", "uniform", "log_uniform", "constant", "zeros", "ones"]
    std: float = 0.0
    value: float = 0.0
    low: float = 0.0
    high: float = 1.0
    through: Literal["exp", "softplus"] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("normal", "uniform", "log_uniform", "constant", "zeros", "ones"):
            raise ValueError(f"unknown initialisation {self.kind!r}")
        if self.std < 0:
            raise ValueError(f"standard deviation {self.std} must not be negative")
        if self.low > self.high:
            raise ValueError(f"uniform bounds {self.low} … {self.high} are reversed")
        if self.through not in (None, "exp", "softplus"):
            raise ValueError(f"unknown function {self.through!r}: use 'exp', 'softplus' or None")
        drawn = self.kind in ("uniform", "log_uniform")
        if self.through is not None and not drawn:
            raise ValueError(f"through={self.through!r} needs uniform values, not {self.kind}")
        if (self.kind == "log_uniform" or self.through is not None) and self.low <= 0:
            raise ValueError(f"values from {self.low} on have no logarithm: use low > 0")


@dataclass(frozen=True, kw_only=True)
class GradSync:
    """A flat range `[start, stop)` of a local gradient that holds a partial sum over `group`."""

    group: Group
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """Everything that others need to know about one local parameter.

    `layout` counts replicas over the model-parallel axes only; whoever shards or replicates over
    data parallelism adds that axis. `decay` (weight decay applies) is by default true except where
    every global tensor held has at most one dimension: biases and norm scales. `fp32` says that the
    parameter is not rounded to the 16 bits of its model.
    """

    layout: TensorLayout
    init: Init
    grad_sync: tuple[GradSync, ...] = ()
    expert: bool = False
    fp32: bool = False
    decay: bool = field(default=cast(bool, None))  # None only until __post_init__ has decided

    def __post_init__(self) -> None:
        if self.decay is None:
            decay = any(len(f.global_shape) > 1 for f in self.layout.fragments)
            object.__setattr__(self, "decay", decay)
        for sync in self.grad_sync:
            stop = self.layout.numel if sync.stop is None else sync.stop
            if not 0 <= sync.start <= stop <= self.layout.numel:
                raise ValueError(
                    f"{', '.join(self.layout.names())}: gradient range {sync.start}:{stop} leaves "
                    f"the {self.layout.numel} local elements"
                )


@runtime_checkable
class HasParamSpecs(Protocol):
    """A module that shards its own parameters and says how."""

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """Return the specs by own parameter name; `prefix` is the module's global path."""
        ...


def join(prefix: str, name: str) -> str:
    """Return `prefix.name`, or the one that is not empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def default_init(name: str, param: torch.Tensor) -> Init:
    """Return what a parameter gets that nothing was said about, by its name and dimensions.

    Matrices are normal with deviation 0.02, names ending in `bias` are 0, and what else has at
    most one dimension is a scale and starts at 1.
    """
    if name.endswith("bias"):
        return Init(kind="zeros")
    return Init(kind="normal", std=0.02) if param.dim() > 1 else Init(kind="ones")


def param_specs(
    model: nn.Module, *, tp: Group, sequence_parallel: bool, prefix: str = ""
) -> dict[str, ParamSpec]:
    """Return the spec of every parameter of `model` by its local qualified name.

    Module paths are global names, with `prefix` in front. A module with a `param_specs` method
    answers for its own parameters (and for those below it that it names). Parameters of all other
    modules are whole and replicated over `tp`; their initial values come from the module's
    mapping `param_init` (`{"weight": Init(...)}`), else from `default_init`; those that its
    attribute `fp32_params` names stay fp32. Under sequence
    parallelism each rank of `tp` sees only its tokens, so the gradients of those whole parameters
    are partial sums over `tp`, unless the module or one above it has `grad_is_partial = False`.
    A parameter object that is reachable twice (tied) appears once, under its first name.

    Raises:
        ValueError: a module with a `param_specs` method leaves out one of its own parameters, or
            gives a layout of another shape than the parameter.
    """
    specs: dict[str, ParamSpec] = {}
    seen: set[int] = set()

    def add(name: str, param: nn.Parameter, spec: ParamSpec) -> None:
        if tuple(param.shape) != spec.layout.shape:
            raise ValueError(
                f"{name}: parameter of shape {list(param.shape)}, layout of shape "
                f"{list(spec.layout.shape)}"
            )
        seen.add(id(param))
        specs[name] = spec

    def walk(module: nn.Module, path: str, partial: bool) -> None:
        partial = partial and getattr(module, "grad_is_partial", True)
        answers = isinstance(module, HasParamSpecs)
        own = module.param_specs(join(prefix, path)) if isinstance(module, HasParamSpecs) else {}
        for key, spec in own.items():
            param = module.get_parameter(key)
            if id(param) not in seen:
                add(join(path, key), param, spec)
        given: Mapping[str, Init] = getattr(module, "param_init", {})
        for key, param in module.named_parameters(recurse=False):
            if id(param) in seen:
                continue
            name = join(path, key)
            if answers:
                raise ValueError(f"{name}: {type(module).__name__}.param_specs leaves it out")
            layout = TensorLayout.whole(join(prefix, name), tuple(param.shape))
            spec = ParamSpec(
                layout=layout.replicated(tp.rank, tp.size),
                init=given.get(key) or default_init(key, param),
                grad_sync=(GradSync(group=tp),) if partial and tp.size > 1 else (),
                fp32=key in getattr(module, "fp32_params", ()),
            )
            add(name, param, spec)
        for key, child in module.named_children():
            walk(child, join(path, key), partial)

    walk(model, "", sequence_parallel)
    return specs


def initialise(
    params: Mapping[str, torch.Tensor], specs: Mapping[str, ParamSpec], key: RngKey
) -> None:
    """Fill every parameter in place with its spec's initial values, the same for every layout.

    An element's value depends on `key`, the name of its global tensor and its flat index there.
    Padding becomes zero.

    Raises:
        ValueError: `params` and `specs` do not have the same names.
    """
    if params.keys() != specs.keys():
        odd = sorted(params.keys() ^ specs.keys())
        raise ValueError(f"parameters and specs differ in {len(odd)} names, first {odd[0]!r}")
    for name, param in params.items():
        fill_(param, specs[name].layout, specs[name].init, key)


def fill_(tensor: torch.Tensor, layout: TensorLayout, init: Init, key: RngKey) -> None:
    """Fill a local tensor in place with the initial values of what it holds; padding is zero."""
    with torch.no_grad():
        if layout.covered < layout.numel:
            tensor.zero_()
        for fragment, view in layout.views(tensor):
            _fill_fragment(fragment, view, init, key.fold(fragment.name))


def _fill_fragment(fragment: Fragment, view: torch.Tensor, init: Init, key: RngKey) -> None:
    if init.kind in ("zeros", "ones", "constant"):
        view.fill_({"zeros": 0.0, "ones": 1.0}.get(init.kind, init.value))
        return
    for box in _blocks(Box.whole(fragment.box.shape), _FILL_ELEMENTS):
        index = _flat_indices(fragment, box, view.device)
        if init.kind == "normal":
            values = counter_normal(key, index).mul_(init.std)
        elif init.kind == "uniform" and init.through is None:
            values = counter_uniform(key, index).mul_(init.high - init.low).add_(init.low)
        else:
            values = _inverse_of_uniform(init, counter_uniform(key, index))
        view[box.slices].copy_(values)


def _inverse_of_uniform(init: Init, share: torch.Tensor) -> torch.Tensor:
    """Turn uniform numbers in [0, 1) into float64 values of a parameter (see `Init`).

    In float64, since the last bits of a logarithm depend on where in a vector its argument lies.
    """
    share = share.double()
    if init.kind == "log_uniform":
        low, high = math.log(init.low), math.log(init.high)
        drawn = share.mul_(high - low).add_(low).exp_()
    else:
        drawn = share.mul_(init.high - init.low).add_(init.low)
    if init.through == "exp":
        return drawn.log_()
    # softplus(y) = log(1 + exp(y)) = x where y = x + log(1 - exp(-x))
    return drawn + (-torch.expm1(-drawn)).log_() if init.through == "softplus" else drawn


def _flat_indices(fragment: Fragment, box: Box, device: torch.device) -> torch.Tensor:
    """Return the flat global index of every element of `box`, counted from the fragment's box."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    strides = row_major_strides(fragment.global_shape)
    for dim, (n, stride) in enumerate(zip(box.shape, strides, strict=True)):
        start = fragment.box.start[dim] + box.start[dim]
        steps = torch.arange(start, start + n, dtype=torch.int64, device=device).mul_(stride)
        index = index.unsqueeze(-1) + steps
    return index


def _blocks(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box along its leading dimensions into blocks of at most `limit` points."""
    if box.numel <= limit:
        yield box
        return
    dim = next(i for i, n in enumerate(box.shape) if n > 1)
    step = max(1, limit // math.prod(box.shape[dim + 1 :]))
    for a in range(0, box.shape[dim], step):
        start = (*box.start[:dim], box.start[dim] + a, *box.start[dim + 1 :])
        size = min(step, box.shape[dim] - a)
        yield from _blocks(Box(start, (*box.shape[:dim], size, *box.shape[dim + 1 :])), limit)
