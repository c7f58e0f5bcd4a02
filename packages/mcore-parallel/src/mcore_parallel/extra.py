"""What modules keep beside their parameters: scales of a quantiser, statistics, counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from mcore_parallel.layout import LayoutTensor


@dataclass(frozen=True, kw_only=True)
class ExtraState:
    """What one module keeps on one rank.

    tensors: by names within the module; their layouts name global tensors, by names within it, too.
        As in `ParamSpec`, layouts count replicas over the model-parallel axes alone: what every
        rank of tensor parallelism has alike is `layout.replicated(tp.rank, tp.size)`.
    values: JSON, the same on every rank that has the module.
    expert: it belongs to experts, whose copies are those of the expert view.
    """

    tensors: Mapping[str, LayoutTensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    expert: bool = False


@runtime_checkable
class KeepsState(Protocol):
    """A module with extra state; one that has these two methods says so."""

    def extra_state(self) -> ExtraState:
        """Return the state. Its tensors share memory with the module: loading fills them."""
        ...

    def load_extra_values(self, values: Mapping[str, Any]) -> None:
        """Take over values that `extra_state` returned once; the tensors have been filled."""
        ...
