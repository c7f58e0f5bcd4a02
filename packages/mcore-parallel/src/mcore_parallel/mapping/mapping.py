"""A mapping as a value, and what it says about every tensor and every region."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from mcore_parallel.layout import Box, Fragment, TensorLayout
from mcore_parallel.layout.fragment import local_motions
from mcore_parallel.mapping.operators import Inward, Operator
from mcore_parallel.mapping.tensors import Mapped, Step, TensorMeta, Tensors


class TensorMapping:
    """A list of two-way operators between the named tensors of another format and ours.

    mapping = TensorMapping([Rename("model.norm.weight", "final_norm.weight"), …])

    `forward` says how ours are made from theirs, `inverse` the reverse; neither touches a value.
    """

    def __init__(self, operators: Iterable[Operator]) -> None:
        self.operators = tuple(operators)
        outside = [isinstance(operator, Inward) for operator in self.operators]
        if True in outside[self._num_inward() :]:
            raise ValueError("operators that run inward alone must stand before all others")

    def inward(self) -> TensorMapping:
        """Return the part of it that runs on the way in alone: to their tensors in usual form."""
        return TensorMapping(self.operators[: self._num_inward()])

    def _num_inward(self) -> int:
        return len(list(takewhile(lambda operator: isinstance(operator, Inward), self.operators)))

    def forward(self, theirs: Mapping[str, TensorMeta]) -> Resolved:
        """Return how our tensors are made from theirs, of these names, shapes and dtypes.

        Tensors that no operator knows keep their names.

        Raises:
            ValueError: something does not fit an operator; names the tensor.
        """
        tensors = Tensors(theirs)
        for operator in self.operators:
            operator.forward(tensors)
        return Resolved.of(tensors)

    def inverse(self, ours: Mapping[str, TensorMeta]) -> Resolved:
        """Return how their tensors are made from ours; as `forward` otherwise."""
        tensors = Tensors(ours)
        for operator in reversed(self.operators):
            operator.inverse(tensors)
        return Resolved.of(tensors)

    def __repr__(self) -> str:
        return f"TensorMapping({list(self.operators)!r})"


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """How the tensors of one side (the targets) are made from those of the other (the sources).

    Attributes:
        tensors: every target, as a layout over names that are sources or, behind a function of
            whole tensors, made-up names.
        steps: the functions, by the made-up names of what they return.
        dropped: sources that go into nothing.
        repeats: dropped sources that must be equal to another tensor: both, by the dropped name.
    """

    tensors: Mapping[str, Mapped]
    steps: Mapping[str, Step]
    dropped: tuple[str, ...]
    repeats: Mapping[str, tuple[Mapped, Mapped]]

    @staticmethod
    def of(tensors: Tensors) -> Resolved:
        """Return what operators have left behind."""
        return Resolved(
            tensors=tensors.entries,
            steps=tensors.steps,
            dropped=tuple(tensors.dropped),
            repeats=tensors.repeats,
        )

    def target(self, name: str) -> Mapped:
        """Return a target; ValueError when there is none of that name."""
        if name not in self.tensors:
            raise ValueError(f"{name} is not among the {len(self.tensors)} tensors of the mapping")
        return self.tensors[name]

    def sources(self, name: str) -> tuple[str, ...]:
        """Return the names of all sources that go into a target, also through functions."""
        found: dict[str, None] = {}

        def walk(layout: TensorLayout) -> None:
            for source in layout.names():
                if source in self.steps:
                    for tensor in self.steps[source].inputs:
                        walk(tensor.layout)
                else:
                    found[source] = None

        walk(self.target(name).layout)
        return tuple(found)

    def is_plain(self, name: str) -> bool:
        """Return whether a target is made by moving elements alone, without a function."""
        return not any(source in self.steps for source in self.target(name).layout.names())

    def regions(self, name: str, box: Box | None = None) -> tuple[Fragment, ...]:
        """Return which regions of which sources fill a region (default: all) of a target.

        A fragment's box is the region of the source `fragment.name`; its offset and strides are
        the place in a contiguous tensor of the region's shape.

        Raises:
            ValueError: there is no such target, or the region leaves it.
        """
        shape = self.target(name).shape
        whole = Box.whole(shape) if box is None else box
        return self.translate(TensorLayout.box(name, shape, whole)).fragments

    def translate(self, layout: TensorLayout) -> TensorLayout:
        """Return the layout over targets of a local tensor as a layout over sources.

        The same local elements, described by where they come from. Padding and replicas stay.

        Raises:
            ValueError: a fragment names no target, or has another global shape than it.
        """
        fragments: list[Fragment] = []
        for f in layout.fragments:
            part = self.target(f.name).layout
            if part.shape != f.global_shape:
                raise ValueError(
                    f"{f.name} has shape {list(part.shape)}, the layout says {list(f.global_shape)}"
                )
            for dim, (start, size) in enumerate(zip(f.box.start, f.box.shape, strict=True)):
                if size != part.shape[dim]:
                    part = part.slice(dim, start, start + size)
            for piece in part.fragments:
                for motion in local_motions(piece, part.shape):
                    placed = motion.placed(f.offset, f.strides)
                    fragments.append(
                        replace(placed, replica=f.replica, num_replicas=f.num_replicas)
                    )
        return TensorLayout(shape=layout.shape, fragments=tuple(fragments))
