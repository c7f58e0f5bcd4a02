"""The axes of a mesh, and the arithmetic that places ranks along them.

Dense parameters see the ranks as tp × cp × dp × pp, expert parameters as etp × ep × edp × pp. The
two views share the pipeline axis and are otherwise folded independently of each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True, kw_only=True)
class AxisView:
    """Ranks 0 … world_size-1 laid out along named axes, the first axis varying fastest.

    Everything is arithmetic on strides: one rank's groups cost no more than their own length, also
    in a world of 100,000 ranks.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        total = 1
        for size in self.sizes:
            total *= size
        return total

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along `axis`."""
        stride = 1
        for size in self.sizes[: self.axes.index(axis)]:
            stride *= size
        return stride

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`."""
        return self.sizes[self.axes.index(axis)]

    def split(self, axis: str, copies: int) -> AxisView:
        """Return the view in which `axis` is two: itself, 1/copies as long, and `axis_copies`.

        Neighbours along the shortened `axis` stay neighbours; `copies` must divide its size.
        """
        at = self.axes.index(axis)
        axes = (*self.axes[:at], axis, f"{axis}_copies", *self.axes[at + 1 :])
        sizes = (*self.sizes[:at], self.sizes[at] // copies, copies, *self.sizes[at + 1 :])
        return AxisView(axes=axes, sizes=sizes)

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank` along each axis."""
        return {axis: rank // self.stride(axis) % self.size(axis) for axis in self.axes}

    def members(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Return, ascending, the ranks that differ from `rank` along `axes` only."""
        wanted = set(axes)
        coords = self.coords(rank)
        base = rank - sum(coords[axis] * self.stride(axis) for axis in wanted)
        return tuple((base + self._offsets(wanted)).tolist())

    def groups(self, axes: Iterable[str]) -> npt.NDArray[np.int64]:
        """Return all groups along `axes` as rows `[groups, size]`, each ascending.

        The rows are in ascending order of their first rank.
        """
        wanted = set(axes)
        firsts = self._offsets(set(self.axes) - wanted)
        return firsts[:, None] + self._offsets(wanted)[None, :]

    def table(self) -> dict[str, npt.NDArray[np.int64]]:
        """Return the coordinates of all ranks, axis by axis: arrays `[world_size]`."""
        ranks = np.arange(self.world_size)
        return {axis: ranks // self.stride(axis) % self.size(axis) for axis in self.axes}

    def _offsets(self, axes: set[str]) -> npt.NDArray[np.int64]:
        offsets = np.zeros(1, dtype=np.int64)
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if axis in axes:
                steps = np.arange(size, dtype=np.int64) * self.stride(axis)
                offsets = (steps[:, None] + offsets[None, :]).reshape(-1)
        return offsets
