"""State that modules keep beside their parameters: scales of a quantiser, statistics, counters.

Tensors of it are global tensors like any other, `extra/<module>/<name>`: cut, replicated and loaded
under another layout by their own layouts. The rest is JSON in the checkpoint's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mcore_ckpt.names import check_path
from mcore_parallel.layout import LayoutTensor, TensorLayout

PREFIX = "extra/"


@dataclass(frozen=True, kw_only=True)
class ExtraState:
    """What one module keeps on one rank.

    tensors: by names within the module; their layouts name global tensors, by names within it, too.
        What every rank has alike is declared so: `layout.replicated(rank, size)`.
    values: JSON, the same on every rank.
    """

    tensors: Mapping[str, LayoutTensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


class KeepsState(Protocol):
    """A module with extra state."""

    def extra_state(self) -> ExtraState:
        """Return the state. Its tensors share memory with the module: loading fills them."""

    def load_extra_values(self, values: Mapping[str, Any]) -> None:
        """Take over values that `extra_state` returned once; the tensors have been filled."""


def collect_extra(
    modules: Mapping[str, KeepsState],
) -> tuple[dict[str, LayoutTensor], dict[str, Any]]:
    """Return tensors and values of all modules of this rank: to be saved, or to be filled.

    Tensors go beside the others into `save` or `load`; the values go into the state that is saved,
    for `restore_extra` to take out again. Every rank passes the same modules' names where it has
    them; values must be the same on all.

    Raises:
        ValueError: a name cannot be stored.
    """
    tensors: dict[str, LayoutTensor] = {}
    values: dict[str, Any] = {}
    for module, keeper in modules.items():
        check_path(module, "module name")
        state = keeper.extra_state()
        for key, held in state.tensors.items():
            tensors[f"{PREFIX}{module}/{key}"] = LayoutTensor(
                held.tensor, _below(held.layout, module)
            )
        values[module] = dict(state.values)
    return tensors, values


def restore_extra(
    modules: Mapping[str, KeepsState], values: Mapping[str, Any], *, strict: bool = True
) -> tuple[str, ...]:
    """Give modules back the values that were saved; return what did not fit, sorted.

    strict: that is an error. Otherwise modules without saved values keep what they have.

    Raises:
        ValueError: modules and values are not of the same names; all are named.
    """
    wrong = [f"{name} has no saved state" for name in modules if name not in values]
    wrong += [f"the saved state of {name} has no module" for name in values if name not in modules]
    if wrong and strict:
        raise ValueError(f"extra state does not fit: {'; '.join(sorted(wrong))}")
    for name, keeper in modules.items():
        if name in values:
            keeper.load_extra_values(values[name])
    return tuple(sorted(wrong))


def _below(layout: TensorLayout, module: str) -> TensorLayout:
    return layout.renamed(lambda name: f"{PREFIX}{module}/{name}")
