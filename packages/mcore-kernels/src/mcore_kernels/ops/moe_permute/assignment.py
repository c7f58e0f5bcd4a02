"""Which copy of which token goes to which row, and which copies are dropped.

T tokens, k copies of each, E experts, R rows that are kept. Copy t·k + j is token t for its j-th
expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

DROPPED = -1
"""The expert of a copy that goes nowhere."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Assignment:
    """order [R]: the copy at each row. places [T, k]: the row of each copy, -1 where dropped.

    counts [E]: rows of each expert, which lie together, in the order of experts; within an expert
    in the order of tokens. All int64, on the device of the experts.
    """

    order: Tensor
    places: Tensor
    counts: Tensor

    @staticmethod
    def of(experts: Tensor, num_experts: int, *, has_dropped: bool = False) -> Assignment:
        """The assignment for experts [T, k], int64, numbers below E or `DROPPED`.

        Nothing is read back from the device unless `has_dropped` says that some may be dropped.
        """
        copies = experts.flatten()
        keys = torch.where(copies == DROPPED, num_experts, copies) if has_dropped else copies
        order = keys.argsort(stable=True)
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device)
        counts.scatter_add_(0, keys, torch.ones_like(keys))
        counts = counts[:num_experts]
        row = torch.arange(copies.numel(), device=experts.device)
        places = torch.empty_like(order).scatter_(0, order, row)
        if has_dropped:
            kept = int(counts.sum())
            order = order[:kept]
            places = torch.where(places < kept, places, DROPPED)
        return Assignment(order=order, places=places.view_as(experts), counts=counts)

    def row_weights(self, weights: Tensor) -> Tensor:
        """The weights [T, k] in the order of the rows [R], differentiable.

        For `GluOp` and `ActivationOp`, which multiply by them on the way: unpermuting then takes
        none, and no weighted copy of the experts' results is made.
        """
        return weights.flatten().gather(0, self.order)


def limit_capacity(
    experts: Tensor,
    weights: Tensor,
    num_experts: int,
    capacity: int,
    *,
    by: Literal["probability", "position"] = "probability",
) -> Tensor:
    """Return experts [T, k] with `DROPPED` where an expert has more than `capacity` copies.

    Those with the largest weights [T, k] are kept, equal ones in the order of tokens; by
    "position" simply the first. A usual capacity is ceil(T · k / E · factor).

    Raises:
        ValueError: capacity is negative, or `by` is none of the two.
    """
    if capacity < 0:
        raise ValueError(f"capacity must not be negative, got {capacity}")
    if by not in ("probability", "position"):
        raise ValueError(f"capacity: by is 'probability' or 'position', got {by!r}")
    copies = experts.flatten()
    order = torch.arange(copies.numel(), device=experts.device)
    if by == "probability":
        order = weights.detach().flatten().argsort(descending=True, stable=True)
    order = order[copies[order].argsort(stable=True)]
    keys = copies[order]
    first = torch.searchsorted(keys, torch.arange(num_experts, device=keys.device))
    rank = torch.arange(keys.numel(), device=keys.device) - first[keys.clamp_min(0)]
    dropped = torch.empty_like(copies, dtype=torch.bool)
    dropped[order] = (rank >= capacity) | (keys == DROPPED)
    return torch.where(dropped, DROPPED, copies).view_as(experts)
