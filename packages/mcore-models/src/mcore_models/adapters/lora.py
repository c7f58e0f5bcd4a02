"""Adapters put onto a model, folded into its weights, and taken off again."""

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from mcore_models.adapters.config import LoRAConfig
from mcore_models.adapters.layers import Adapter, Linear, part_names
from mcore_models.build import DEFAULT_KEY
from mcore_models.changes import check_matches, refuse_together
from mcore_models.common.block import Block
from mcore_models.common.context import TokenContext
from mcore_models.common.latent_attention import LatentAttention
from mcore_models.gpt import GPT
from mcore_parallel import RngKey, initialise
from mcore_parallel.expert import ExpertColumnLinear, ExpertRowLinear
from mcore_parallel.layout import LayoutTensor
from mcore_parallel.tensor import ColumnParallelLinear, RowParallelLinear

_KINDS = (ColumnParallelLinear, RowParallelLinear, ExpertColumnLinear, ExpertRowLinear)


def add_lora(model: GPT, config: LoRAConfig, *, key: RngKey = DEFAULT_KEY) -> tuple[str, ...]:
    """Give linear layers adapters, and let nothing else be trained; return the adapted names.

    The outputs stay what they are, since B starts at zero; A is filled from `key`, the same for
    every layout. A model on "meta" is left without values: whoever gives it some fills these too.
    Call it on every rank of the model's mesh (it communicates over `mesh.world`), and before
    whatever collects gradients is made.

    Raises:
        ValueError: on every rank alike: a pattern matches no linear layer on any rank, dropout is
            asked for within experts or in a T5, or the model has adapters already.
    """
    world = model.mesh.world
    has_some = "the model has adapters: merge them first" if adapters(model) else None
    refuse_together(has_some, world)
    linears = _linears(model)
    names = [name for path, linear in linears.items() for name in part_names(linear, path)]
    check_matches("lora.targets", config.targets, names, world)
    refuse_together(_no_dropout(config, names, model), world)
    model.requires_grad_(False)
    found: list[str] = []
    for path, linear in linears.items():
        parts = part_names(linear, path)
        adapted = [i for i, name in enumerate(parts) if _matches(name, config)]
        if adapted:
            _attach(linear, Adapter(linear, path, adapted, config, model.mesh.tp))
            found += [parts[i] for i in adapted]
    new = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if new and not any(parameter.is_meta for parameter in new.values()):
        specs = model.specs()
        initialise(new, {name: specs[name] for name in new}, key)
    if config.dropout:
        _tell_context(model)
    return tuple(found)


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """The adapters of a model, by the name of the module that each is added to."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}
    return {name.rpartition(".")[0]: module for name, module in found.items()}


def adapter_tensors(model: GPT, prefix: str = "model/") -> dict[str, LayoutTensor]:
    """A and B of all adapters here, with their layouts, to save or fill alone.

    Their global names begin with `prefix`, as in a checkpoint of the whole model.
    """
    specs = model.specs()
    return {
        name: LayoutTensor(
            model.get_parameter(name).detach(), specs[name].layout.renamed(prefix.__add__)
        )
        for place in adapters(model)
        for name in (f"{place}.lora.a", f"{place}.lora.b")
    }


def merge(model: GPT) -> None:
    """Add the adapters to the weights of their layers, for good, and take them off.

    The model then is one without adapters, whose weights are written and converted as any other's.
    """
    for name, adapter in adapters(model).items():
        _fold(model.get_submodule(name), adapter)


@contextmanager
def merged(model: GPT) -> Iterator[None]:
    """Within the block the adapters are merged; afterwards all is what it was, bit for bit.

    The weights are kept meanwhile, a copy of those that have adapters.
    """
    before: list[tuple[Any, Adapter, Tensor]] = []
    try:
        for name, adapter in adapters(model).items():
            linear: Any = model.get_submodule(name)
            before.append((linear, adapter, linear.weight.detach().clone()))
            _fold(linear, adapter)
        yield
    finally:
        for linear, adapter, weight in before:
            with torch.no_grad():
                linear.weight.copy_(weight)
            _attach(linear, adapter)


def _fold(linear: nn.Module, adapter: Adapter) -> None:
    weight: Any = linear.weight
    with torch.no_grad():
        weight.copy_(weight.float() + adapter.delta())
    linear.__dict__.pop("_lora_hook").remove()
    del linear.lora


def _attach(linear: nn.Module, adapter: Adapter) -> None:
    linear.add_module("lora", adapter)
    linear.__dict__["_lora_hook"] = linear.register_forward_hook(_added)


def _added(linear: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
    found: Tensor = linear.get_submodule("lora")(*args)
    return out + found.view_as(out)


def _matches(name: str, config: LoRAConfig) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in config.targets)


def _linears(model: GPT) -> dict[str, Linear]:
    """The linear layers that can have adapters, by the names of their modules."""
    # Decoding looks through this one's weight, not at what it returns.
    looked_through = {
        id(module.kv_up) for module in model.modules() if isinstance(module, LatentAttention)
    }
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _KINDS)
        and id(module) not in looked_through
        and not getattr(module, "skip_bias_add", False)
        and not getattr(module, "gather_output", False)
    }


def _no_dropout(config: LoRAConfig, names: list[str], model: GPT) -> str | None:
    """Why there can be no dropout here, if any is asked for."""
    asked = f"lora.dropout={config.dropout}"
    if not config.dropout:
        return None
    if model.config.t5 is not None:
        return f"{asked} and t5, whose layers see two sequences: use dropout 0"
    inside = next((x for x in names if ".moe." in x and _matches(x, config)), None)
    if inside is None:
        return None
    return (
        f"{asked} cannot reach {inside}, which sees rows and not tokens: "
        f"use dropout 0, or targets without the experts"
    )


def _tell_context(model: GPT) -> None:
    """Let adapters know of the tokens and the key of the part that calls them."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for part in (part for block in blocks for part in block.children()):
        inside = list(adapters(part).values())

        def enter(_: nn.Module, args: tuple[Any, ...], inside: list[Adapter] = inside) -> None:
            context = next((x for x in args if isinstance(x, TokenContext)), None)
            for adapter in inside:
                adapter.context = context

        def leave(_: nn.Module, args: Any, out: Any, inside: list[Adapter] = inside) -> None:
            for adapter in inside:
                adapter.context = None

        if inside:
            part.register_forward_pre_hook(enter)
            part.register_forward_hook(leave)
