"""Values through a mapping: regions of targets, read as regions of sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from mcore_parallel.layout import Box, LayoutTensor, TensorLayout
from mcore_parallel.mapping.mapping import Resolved
from mcore_parallel.mapping.tensors import Mapped, Step

Read = Callable[[str, Box], torch.Tensor]
"""Returns a region of a source, as a tensor of the region's shape that is the caller's own."""


class MappedReader:
    """Reads targets of a mapping. Of the sources it asks for the regions needed and no others.

    A function of whole tensors is the exception: its inputs are read whole. What it returned last
    is kept, so that several regions of it in a row cost one call.

    read: how a region of a source is read.
    """

    def __init__(self, resolved: Resolved, read: Read) -> None:
        self.resolved = resolved
        self._read = read
        self._last: tuple[Step, Sequence[torch.Tensor]] | None = None

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a region (default: all) of the target `name`, in its dtype.

        Raises:
            ValueError: there is no such target, or the region leaves it.
        """
        target = self.resolved.target(name)
        region = Box.whole(target.shape) if box is None else box
        layout = TensorLayout.box(name, target.shape, region)
        return self._assemble(self.resolved.translate(layout), target.dtype)

    def fill(self, local: LayoutTensor) -> None:
        """Fill a local tensor, whose layout names targets, in place; padding is left alone.

        Values are converted to the tensor's dtype.
        """
        self._fill(local.tensor, self.resolved.translate(local.layout))

    def same(self, first: Mapped, second: Mapped, max_elements: int = 1 << 24) -> bool:
        """Return whether two tensors are equal, comparing some rows at a time."""
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        rows = first.shape[0] if first.shape else 1
        step = max(1, max_elements * rows // max(first.layout.numel, 1))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            blocks = [
                self._assemble(t.layout.slice(0, start, stop) if first.shape else t.layout, t.dtype)
                for t in (first, second)
            ]
            if not torch.equal(*blocks):
                return False
        return True

    def _fill(self, local: torch.Tensor, layout: TensorLayout) -> None:
        for fragment, view in layout.views(local):
            view.copy_(self._source(fragment.name, fragment.box))

    def _assemble(self, layout: TensorLayout, dtype: torch.dtype) -> torch.Tensor:
        first = layout.fragments[0] if layout.fragments else None
        if first is not None and first.name not in self.resolved.steps and _is_one_piece(layout):
            return self._read(first.name, first.box).reshape(layout.shape)  # no second copy
        value = torch.empty(layout.shape, dtype=dtype)
        self._fill(value, layout)
        return value

    def _source(self, name: str, box: Box) -> torch.Tensor:
        step = self.resolved.steps.get(name)
        if step is None:
            return self._read(name, box)
        if self._last is None or self._last[0] is not step:
            self._last = None  # frees the memory before the next one is made
            inputs = [self._assemble(t.layout, t.dtype) for t in step.inputs]
            self._last = step, step.transform(inputs)
        value = self._last[1][step.outputs.index(name)]
        return value[box.slices]


def evaluate(resolved: Resolved, sources: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the values of all targets from those of all sources: a mapping of what fits memory."""
    reader = MappedReader(resolved, lambda name, box: sources[name][box.slices].clone())
    return {name: reader.read(name) for name in resolved.tensors}


def _is_one_piece(layout: TensorLayout) -> bool:
    """Whether the tensor's elements are those of one region, in the region's own order."""
    if len(layout.fragments) != 1 or layout.fragments[0].box.numel != layout.numel:
        return False
    step, fragment = 1, layout.fragments[0]
    for size, stride in zip(reversed(fragment.box.shape), reversed(fragment.strides), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True
