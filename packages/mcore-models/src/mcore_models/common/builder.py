"""How parts of a model are made: the context that every builder gets, and the table of letters."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from mcore_kernels import Kernels
from mcore_models.common.recompute import RecomputeConfig
from mcore_models.config import ModelConfig
from mcore_parallel import Group, ParallelMesh, RngKey

T = TypeVar("T")
_SPARSE = "D"


@dataclass(frozen=True, kw_only=True, eq=False)
class BuildContext:
    """Where and with what a model is built: layers take from it what they need.

    `device` is where parameters are made; while a model is built it is `meta`, and `build_model`
    gives the parameters their place and values afterwards.
    """

    mesh: ParallelMesh
    kernels: Kernels
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    builders: "Mapping[str, Builder]" = field(default_factory=dict)
    key: RngKey = field(default_factory=lambda: RngKey(0))
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the one object that all layers of this model have under `key`; made once.

        For what plans its work for a micro-batch, which then need not be done by every layer.
        """
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    @property
    def tp(self) -> Group:
        """The tensor-parallel group."""
        return self.mesh.tp

    @property
    def sequence_parallel(self) -> bool:
        """Whether hidden states between the linears are slices [T / tp, H]."""
        return self.mesh.config.sequence_parallel and self.mesh.tp.size > 1


class Builder(Protocol):
    """Makes one part of a layer (a mixer, a feed-forward or a norm).

    The module's `forward(hidden)` or `forward(hidden, context)` maps [T, H] to [T, H]; `context` is
    a `TokenContext`. A module that knows nothing of ranks sees all tokens of the micro-batch and
    runs alike on every tensor-parallel rank. One with the attribute `parallel = True` gets this
    rank's hidden states ([T / tp, H] under sequence parallelism) and communicates itself. Whatever
    is random in a module must come from `context.dropout`, which is the same on every rank.

    Parameters made on `context.device` are filled by the model's own initialisation; parameters
    made on a real device (plain `nn.Linear(...)`) keep the values they were made with, and torch's
    generator is seeded from the key and the layer around the call, so these do not depend on the
    layout either.
    """

    def __call__(
        self, config: ModelConfig, context: BuildContext, layer_index: int, /
    ) -> nn.Module:
        """The part for layer `layer_index` (counted globally; `num_layers` for the final norm)."""
        ...


def wants_context(module: nn.Module) -> bool:
    """Whether `module.forward` takes a second positional argument, the `TokenContext`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    required = [p for p in parameters if p.kind in kinds and p.default is p.empty]
    return len(required) > 1


def find_builder(letter: str, layer_index: int, known: Mapping[str, Builder]) -> Builder:
    """The builder of a pattern letter.

    Raises:
        ValueError: when nobody builds that letter, naming the letters that are known.
    """
    if letter in known:
        return known[letter]
    close = difflib.get_close_matches(letter, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    if letter == _SPARSE:
        raise ValueError(
            f"layer {layer_index} asks for {letter!r}, sparse attention by an indexer, which is "
            f"not built here: use '*' or '+', or give builders={{{letter!r}: …}} to build_model"
        )
    raise ValueError(
        f"layer {layer_index} asks for {letter!r}, which nothing builds: {hint}"
        f"known are {', '.join(sorted(known))} and '.' for none; "
        f"give builders={{{letter!r}: …}} to build_model"
    )


def import_builders(path: str | None) -> Mapping[str, Builder]:
    """The builders by letter that an import path `module:NAME` leads to; none for None.

    Raises:
        ValueError: there is nothing importable at the path, or no mapping.
    """
    if path is None:
        return {}
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"builders={path!r} is no import path: write module:NAME")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"builders={path!r} cannot be imported: {error}") from None
    if not isinstance(found, Mapping) or not all(map(callable, found.values())):
        raise ValueError(f"builders={path!r} is no mapping from letters to builders: {found!r}")
    return found


def build_seeded(
    builder: Builder, config: ModelConfig, build: BuildContext, layer_index: int, place: str
) -> nn.Module:
    """Call `builder` with torch's CPU generator seeded by the layer and put back afterwards.

    A module that fills its own parameters then does so alike on every rank, in every layout.
    """
    with seeded(build.key.fold("builder", layer_index, place)):
        return builder(config, build, layer_index)


@contextmanager
def seeded(key: RngKey) -> Iterator[None]:
    """Seed torch's CPU generator by `key`, and put it back at the end."""
    before = torch.get_rng_state()
    # The CPU generator alone: torch.manual_seed would seed those of the devices too, for good.
    torch.default_generator.manual_seed(key.seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
