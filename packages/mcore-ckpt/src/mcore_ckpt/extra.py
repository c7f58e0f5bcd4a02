"""State that modules keep beside their parameters: scales of a quantiser, statistics, counters.

Tensors of it are global tensors like any other, `extra/<module>/<name>`: cut, replicated and loaded
under another layout by their own layouts. The rest is JSON in the checkpoint's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mcore_ckpt.names import check_path
from mcore_parallel.extra import ExtraState, KeepsState
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor, TensorLayout

__all__ = ["PREFIX", "ExtraState", "KeepsState", "collect_extra", "restore_extra"]

PREFIX = "extra/"


def collect_extra(
    modules: Mapping[str, KeepsState],
    *,
    copies: Callable[[ExtraState], Group] = lambda state: Group.single(),
) -> tuple[dict[str, LayoutTensor], dict[str, Any]]:
    """Return tensors and values of all modules of this rank: to be saved, or to be filled.

    Tensors go beside the others into `save` or `load`; the values go into the state that is saved,
    for `restore_extra` to take out again. Every rank passes the same modules' names where it has
    them; values must be the same on all.

    copies: the group over which the ranks hold what layouts do not count: data parallelism. Nothing
        is sent over it.

    Raises:
        ValueError: a name cannot be stored, or a tensor has no memory (it is on meta).
    """
    tensors: dict[str, LayoutTensor] = {}
    values: dict[str, Any] = {}
    for module, keeper in modules.items():
        check_path(module, "module name")
        state = keeper.extra_state()
        group = copies(state)
        for key, held in state.tensors.items():
            name = f"{PREFIX}{module}/{key}"
            if held.tensor.is_meta:
                raise ValueError(f"{name} is on meta: it needs memory from the start")
            layout = _below(held.layout, module).replicated(group.rank, group.size)
            tensors[name] = LayoutTensor(held.tensor, layout)
        values[module] = dict(state.values)
    return tensors, values


def restore_extra(
    modules: Mapping[str, KeepsState],
    values: Mapping[str, Any],
    *,
    strict: bool = True,
    everywhere: Iterable[str] | None = None,
) -> tuple[str, ...]:
    """Give modules back the values that were saved; return what did not fit, sorted.

    strict: that is an error. Otherwise modules without saved values keep what they have.
    everywhere: the modules' names on all ranks together, where ranks have different ones; what does
        not fit is then the same on all.

    Raises:
        ValueError: modules and values are not of the same names; all are named.
    """
    names = set(modules if everywhere is None else everywhere)
    wrong = [f"{name} has no saved state" for name in names if name not in values]
    wrong += [f"the saved state of {name} has no module" for name in values if name not in names]
    if wrong and strict:
        raise ValueError(f"extra state does not fit: {'; '.join(sorted(wrong))}")
    for name, keeper in modules.items():
        if name in values:
            keeper.load_extra_values(values[name])
    return tuple(sorted(wrong))


def _below(layout: TensorLayout, module: str) -> TensorLayout:
    return layout.renamed(lambda name: f"{PREFIX}{module}/{name}")
