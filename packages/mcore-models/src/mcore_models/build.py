"""From a configuration to a model in place: made on meta, checked, given memory and values."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from mcore_kernels import KernelConfig, Kernels, Target
from mcore_models._checks import nearest_divisors
from mcore_models.bert import Bert
from mcore_models.changes import Replacement, replace_modules
from mcore_models.common.block import check_parts
from mcore_models.common.builder import BuildContext, Builder
from mcore_models.common.recompute import RecomputeConfig
from mcore_models.config import ModelConfig
from mcore_models.gpt import GPT
from mcore_models.t5 import T5
from mcore_parallel import (
    ParallelConfig,
    ParallelMesh,
    RngKey,
    all_gather_object,
    initialise,
)
from mcore_parallel.context import check_context_attention, check_heads

_FAMILIES: Mapping[str, type[GPT]] = {"gpt": GPT, "bert": Bert, "t5": T5}
DEFAULT_KEY = RngKey(0)
"""The seed of a model that was given none."""


def build_model(
    config: ModelConfig,
    mesh: ParallelMesh | None = None,
    *,
    kernels: KernelConfig | Kernels | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    builders: Mapping[str, Builder] | None = None,
    key: RngKey | None = DEFAULT_KEY,
    stage_layers: Sequence[int] | None = None,
    recompute: RecomputeConfig | None = None,
    replacements: Mapping[str, Replacement] | None = None,
) -> GPT:
    """This rank's part of the model, ready to use: the same weights under every layout.

    Args:
        config: the architecture.
        mesh: where this process stands; `None` is a process alone.
        kernels: which operators to use (default: the best that run on the device).
        dtype: of parameters and hidden states.
        device: where the parameters lie; default the mesh's. "meta" gives a model without memory.
        builders: makers of parts by pattern letter, and of all norms by the name "norm".
        key: seed of the initial values; `None` leaves zeros, for a model about to be loaded.
        stage_layers: global indices of the layers held here, as one chunk; default the mesh's
            division.
        recompute: what the backward pass computes again; default nothing.
        replacements: makers of other linear layers and norms, by patterns of their names (see
            `Replacement`).

    Ranks of a mesh with processes call it together: they compare what they build over
    `mesh.world`.

    Raises:
        ValueError: the layout cannot carry the architecture, a pattern letter that nobody builds,
            an operator that cannot run, a replacement for nothing, or ranks that were asked for
            different models.
    """
    mesh = ParallelMesh.single() if mesh is None else mesh
    device = mesh.device if device is None else torch.device(device)
    check_layout(config, mesh.config, builders)
    recompute = recompute or RecomputeConfig()
    recompute.check(config, mesh.config)
    if not isinstance(kernels, Kernels):
        place = mesh.device if device.type == "meta" else device
        target = Target.of(place, dtype=dtype, head_dim=_head_size(config))
        kernels = Kernels(kernels or KernelConfig(), target)
    chunks = [stage_layers] if stage_layers is not None else _chunks(config, mesh)
    _check_agreement(mesh, config, kernels, key)
    build = BuildContext(
        mesh=mesh,
        kernels=kernels,
        dtype=dtype,
        device=torch.device("meta"),
        builders=dict(builders or {}),
        key=RngKey(0) if key is None else key,
        recompute=recompute,
    )
    model = _FAMILIES[config.family](config, build, chunks)
    if replacements:
        replace_modules(model, replacements, build)
    if device.type == "meta":
        return model.to(device)
    _place(model, device, dtype, key)
    return model


def _head_size(config: ModelConfig) -> int | None:
    """The channels of a head's queries and keys; None without heads."""
    if config.head_size or config.latent is None:
        return config.head_size or None
    return config.latent.query_dim


def _chunks(config: ModelConfig, mesh: ParallelMesh) -> list[range]:
    """The layers of each chunk of this rank's pipeline stage."""
    line, placed = mesh.config.line, mesh.config.place_layers(config.total_layers)
    return [placed[line.position(mesh.pp.rank, chunk)] for chunk in range(line.num_chunks)]


def check_layout(
    config: ModelConfig, parallel: ParallelConfig, builders: Mapping[str, Builder] | None = None
) -> None:
    """Check that the architecture can be built, and cut as `parallel` (resolved) says.

    `builders` are those that `build_model` will be given.

    Raises:
        ValueError: one line naming the numbers and the degrees of parallelism that fit, or the
            layer and its letter.
    """
    check_parts(config, builders or {})
    tp, cp = parallel.tp, parallel.cp
    letters = set("".join(config.layer_pattern))
    _check_experts(config, parallel)
    if config.t5 is not None and parallel.lanes > 1:
        raise ValueError(
            f"lanes={parallel.lanes} let others compute while tokens travel to experts, which an "
            f"encoder with a decoder that reads it (t5) has not: use lanes=1"
        )
    if cp > 1:
        # Parts that see single tokens do not care; of a part of somebody's own nothing is known.
        whole = sorted(letters - set("*+MG-E.") | letters & set("*+MG") & set(builders or {}))
        if whole:
            names = " and ".join(f"the part {x!r}" for x in whole)
            raise ValueError(f"{names} cannot split documents over cp={cp} ranks: use cp=1")
    counts: dict[str, tuple[int, Callable[[int, int], bool]]] = {}
    if "*" in letters:
        counts["num_heads"] = config.num_heads, _divides
        counts["num_kv_heads"] = config.kv_heads, _divides_or_is_divided
    if "-" in letters:
        counts["ffn_size"] = config.mlp_size, _divides
    if "E" in letters and config.moe is not None and config.moe.shared_ffn_size:
        counts["moe.shared_ffn_size"] = config.moe.shared_ffn_size, _divides
    if "M" in letters and config.mamba is not None:
        counts["mamba.num_heads"] = config.mamba.num_heads, _divides
        counts["mamba.num_groups"] = config.mamba.num_groups, _divides_or_is_divided
    if "G" in letters and config.delta_net is not None:
        counts["delta_net.num_value_heads"] = config.delta_net.num_value_heads, _divides
        counts["delta_net.num_key_heads"] = config.delta_net.num_key_heads, _divides_or_is_divided
    if "+" in letters and config.latent is not None:
        counts["latent.num_heads"] = config.latent.num_heads, _divides

    def bad(degree: int) -> list[str]:
        return [f"{name}={n}" for name, (n, fits) in counts.items() if not fits(degree, n)]

    if bad(tp):
        below = next(degree for degree in range(tp - 1, 0, -1) if not bad(degree))
        most = max(n for n, _ in counts.values())
        above = next((degree for degree in range(tp + 1, most + 1) if not bad(degree)), None)
        near = f"{below}" if above is None else f"{below} or {above}"
        raise ValueError(f"{bad(tp)[0]} cannot be cut over tp={tp}: use tp={near}")
    if cp > 1:
        _check_context(config, parallel)
    parallel.place_layers(config.total_layers)


def _check_context(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Check that the heads of a tensor-parallel rank suffice for its context-parallel ones."""
    mamba, tp, cp = config.mamba, parallel.tp, parallel.cp
    if config.t5 is not None:  # which deals out its heads whatever the kind: scores have a bias
        heads = config.num_heads // tp
        check_heads(heads, heads, cp, what=f"cp={cp}: {heads} heads with a bias (of tp={tp})")
        return
    if mamba is not None:
        heads, groups = mamba.num_heads // tp, max(mamba.num_groups // tp, 1)
        what = f"cp={cp}: Mamba-2's {heads} heads and {groups} groups (of tp={tp})"
        check_heads(heads, groups, cp, what=what)
    if config.delta_net is not None:
        heads = config.delta_net.num_value_heads // tp
        keys = max(config.delta_net.num_key_heads // tp, 1)
        what = f"cp={cp}: the delta net's {heads} value heads and {keys} key heads (of tp={tp})"
        check_heads(heads, keys, cp, what=what)
    for index, letters in enumerate(config.layer_pattern):
        if "*" in letters:
            check_context_attention(
                parallel.context_kind_of(index),
                cp,
                num_heads=config.num_heads // tp,
                num_kv_heads=max(config.kv_heads // tp, 1),
            )
        if "+" in letters and config.latent is not None:
            heads, kind = config.latent.num_heads // tp, parallel.context_kind_of(index)
            check_context_attention(kind, cp, num_heads=heads, num_kv_heads=heads)


def _check_experts(config: ModelConfig, parallel: ParallelConfig) -> None:
    ep, etp = parallel.ep, parallel.tp if parallel.etp is None else parallel.etp
    if config.moe is None:
        if ep > 1:
            raise ValueError(f"ep={ep} divides experts, and there are none here: use ep=1")
        return
    experts, width = config.moe.num_experts, config.moe.expert_ffn_size
    ranks = None if parallel.dp is None else parallel.tp * parallel.cp * parallel.dp
    if experts % ep:
        near = _near_degrees("ep", ep, experts, None if ranks is None else ranks // etp)
        raise ValueError(f"num_experts={experts} cannot be dealt out over ep={ep}: {near}")
    if width % etp:
        near = _near_degrees("etp", etp, width, None if ranks is None else ranks // ep)
        raise ValueError(f"expert_ffn_size={width} cannot be cut over etp={etp}: {near}")


def _near_degrees(axis: str, value: int, count: int, room: int | None) -> str:
    """Which degrees divide `count`: those that fit the `room` in this world, then any others."""
    near = nearest_divisors(count, value)
    here = near if room is None else nearest_divisors(math.gcd(count, room), value)
    others = "" if here == near else f", or with another world {axis}={near}"
    return f"use {axis}={here}{others}"


def _divides(degree: int, count: int) -> bool:
    return count % degree == 0


def _divides_or_is_divided(degree: int, count: int) -> bool:
    return count % degree == 0 or degree % count == 0


def _check_agreement(
    mesh: ParallelMesh, config: ModelConfig, kernels: Kernels, key: RngKey | None
) -> None:
    if mesh.world.pg is None:
        return
    asked = {"architecture": config, "kernels": kernels.choices(), "key": key}
    digests = {k: hashlib.sha256(repr(v).encode()).hexdigest() for k, v in asked.items()}
    digests["kernels"] = kernels.digest()
    for rank, theirs in enumerate(all_gather_object(digests, mesh.world)):
        for name, digest in digests.items():
            if theirs[name] != digest:
                raise ValueError(
                    f"ranks {mesh.world.rank} and {rank} of the mesh build different models: "
                    f"their {name} differ, here {asked[name]}"
                )


def _place(model: GPT, device: torch.device, dtype: torch.dtype, key: RngKey | None) -> None:
    """Give meta parameters memory on `device` and initial values; move the others there."""
    placed: dict[int, nn.Parameter] = {}
    empty: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in placed:
                kept = name in getattr(module, "fp32_params", ())
                placed[id(parameter)] = _placed(parameter, device, None if kept else dtype)
                if parameter.is_meta:
                    empty.add(id(placed[id(parameter)]))
            setattr(module, name, placed[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                raise ValueError(
                    f"buffer {name!r} of {path} was made on meta and its values are unknown: "
                    f"make it on the CPU"
                )
            setattr(module, name, buffer.to(device))
    if key is not None:
        parameters = {n: p for n, p in model.named_parameters() if id(p) in empty}
        specs = model.specs()
        initialise(parameters, {name: specs[name] for name in parameters}, key)


def _placed(
    parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None
) -> nn.Parameter:
    if parameter.is_meta:
        data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
    else:
        data = parameter.detach().to(device, dtype if parameter.is_floating_point() else None)
    return nn.Parameter(data, requires_grad=parameter.requires_grad)
