"""What operators work on: tensors by name, each described by the tensors it is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mcore_parallel.layout import TensorLayout

Transform = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""A function of whole tensors. It is also called with tensors on meta, to learn the shapes."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape and dtype of a global tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Mapped:
    """A tensor on one side of a mapping as a layout over the tensors of the other side.

    `layout` is that of the whole contiguous tensor; it covers every element once.
    """

    layout: TensorLayout
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.layout.shape


@dataclass(frozen=True, slots=True)
class Step:
    """A function of whole tensors within a mapping, and the made-up names of what it returns."""

    inputs: tuple[Mapped, ...]
    outputs: tuple[str, ...]
    transform: Transform


class Tensors:
    """The tensors between two operators, by their names at that moment.

    `steps` maps the made-up name of a tensor that a function returns to that function's step.
    `repeats` are pairs that must be equal, by the name of the first, which has been dropped.
    """

    def __init__(self, metas: Mapping[str, TensorMeta]) -> None:
        self.entries = {
            name: Mapped(TensorLayout.whole(name, meta.shape), meta.dtype)
            for name, meta in metas.items()
        }
        self.steps: dict[str, Step] = {}
        self.dropped: list[str] = []
        self.repeats: dict[str, tuple[Mapped, Mapped]] = {}

    def take(self, name: str) -> Mapped:
        """Return a tensor and take it out."""
        return self.entries.pop(name)

    def take_alike(self, names: Sequence[str]) -> list[Mapped]:
        """Take tensors that are to become one; ValueError when their dtypes differ."""
        found = [self.take(name) for name in names]
        for name, tensor in zip(names, found, strict=True):
            if tensor.dtype != found[0].dtype:
                raise ValueError(
                    f"{name} is {tensor.dtype}, {names[0]} is {found[0].dtype}: one tensor is made "
                    f"of them, so they must have one dtype"
                )
        return found

    def put(self, name: str, layout: TensorLayout, dtype: torch.dtype) -> None:
        """Add a tensor; ValueError when there is one of that name."""
        if name in self.entries:
            raise ValueError(f"two tensors become {name}")
        self.entries[name] = Mapped(layout, dtype)

    def apply(self, transform: Transform, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Take the inputs and add what the function makes of them, shapes learnt on meta."""
        taken = tuple(self.take(name) for name in inputs)
        metas = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in taken]
        made = transform(metas)
        if len(made) != len(outputs):
            raise ValueError(f"the function for {', '.join(outputs)} returns {len(made)} tensors")
        names = tuple(f"exact:{len(self.steps) + i}:{name}" for i, name in enumerate(outputs))
        step = Step(taken, names, transform)
        for made_up, name, value in zip(names, outputs, made, strict=True):
            self.steps[made_up] = step
            self.put(name, TensorLayout.whole(made_up, tuple(value.shape)), value.dtype)

    def drop(self, names: Iterable[str]) -> None:
        """Take tensors out for good."""
        for name in names:
            self.take(name)
            self.dropped.append(name)
