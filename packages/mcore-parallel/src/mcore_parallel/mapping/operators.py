"""Small two-way operators: between another format's named tensors and ours.

`theirs` are names in the other format, `ours` those of docs/tensor-names.md; both are patterns (see
`names`). Operators run in order over one set of tensors (`forward`: theirs become ours) and in
reverse order the other way (`inverse`). One whose tensors are absent does nothing, so that one list
serves variants (with or without biases); one that finds some of its tensors but not all refuses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_parallel.layout import TensorLayout
from mcore_parallel.mapping.names import choices, fill, find, find_groups, placeholders
from mcore_parallel.mapping.tensors import Tensors, Transform


class Operator(ABC):
    """One step of a mapping, in both directions."""

    @abstractmethod
    def forward(self, tensors: Tensors) -> None:
        """Replace their tensors by ours; ValueError when something does not fit, by name."""

    @abstractmethod
    def inverse(self, tensors: Tensors) -> None:
        """Replace our tensors by theirs; ValueError when something does not fit, by name."""


@dataclass(frozen=True)
class Rename(Operator):
    """Another name."""

    theirs: str
    ours: str

    def __post_init__(self) -> None:
        _check_alike([self.theirs], [self.ours])

    def forward(self, tensors: Tensors) -> None:
        """Their name becomes ours."""
        _rename(tensors, self.theirs, self.ours)

    def inverse(self, tensors: Tensors) -> None:
        """Our name becomes theirs."""
        _rename(tensors, self.ours, self.theirs)


@dataclass(frozen=True)
class Transpose(Operator):
    """The dimensions of `name` in another order: dimension i of ours is `dims[i]` of theirs."""

    name: str
    dims: tuple[int, ...] = (1, 0)

    def __post_init__(self) -> None:
        placeholders(self.name)
        if sorted(self.dims) != list(range(len(self.dims))):
            raise ValueError(f"{self.name}: {self.dims} is no permutation of dimensions")

    def forward(self, tensors: Tensors) -> None:
        """Permute."""
        self._permute(tensors, self.dims)

    def inverse(self, tensors: Tensors) -> None:
        """Permute back."""
        self._permute(tensors, [self.dims.index(i) for i in range(len(self.dims))])

    def _permute(self, tensors: Tensors, dims: Sequence[int]) -> None:
        for _, (name,) in find_groups([self.name], tensors.entries, choices([self.name])):
            tensor = tensors.take(name)
            if len(tensor.shape) != len(dims):
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}, not {len(dims)} dimensions"
                )
            tensors.put(name, tensor.layout.permuted(dims), tensor.dtype)


@dataclass(frozen=True)
class Reshape(Operator):
    """The elements of `name` in the same order under another shape.

    With the dimensions split, `Split` cuts per head or per group, at one region for each. It is not
    meant for taking every second element: that would be a region for each; use `Exact` there.
    """

    name: str
    theirs: tuple[int, ...]
    ours: tuple[int, ...]

    def __post_init__(self) -> None:
        placeholders(self.name)
        if math.prod(self.theirs) != math.prod(self.ours):
            raise ValueError(f"{self.name}: {self.theirs} and {self.ours} differ in elements")

    def forward(self, tensors: Tensors) -> None:
        """Their shape becomes ours."""
        self._reshape(tensors, self.theirs, self.ours)

    def inverse(self, tensors: Tensors) -> None:
        """Our shape becomes theirs."""
        self._reshape(tensors, self.ours, self.theirs)

    def _reshape(self, tensors: Tensors, old: tuple[int, ...], new: tuple[int, ...]) -> None:
        for _, (name,) in find_groups([self.name], tensors.entries, choices([self.name])):
            tensor = tensors.take(name)
            if tensor.shape != old:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(old)}")
            tensors.put(name, tensor.layout.reshaped(new), tensor.dtype)


@dataclass(frozen=True)
class Split(Operator):
    """One tensor of theirs cut along `dim` into ours: of `sizes`, by default equal ones."""

    theirs: str
    ours: tuple[str, ...]
    sizes: tuple[int, ...] | None = None
    dim: int = 0

    def __post_init__(self) -> None:
        _check_alike([self.theirs], self.ours)
        if self.sizes is not None and len(self.sizes) != len(self.ours):
            raise ValueError(f"{self.theirs}: {len(self.sizes)} sizes for {len(self.ours)} parts")

    def forward(self, tensors: Tensors) -> None:
        """Cut."""
        _split(tensors, self.theirs, self.ours, self.sizes, self.dim)

    def inverse(self, tensors: Tensors) -> None:
        """Join."""
        _join(tensors, self.ours, self.theirs, self.sizes, self.dim)


@dataclass(frozen=True)
class Concat(Operator):
    """Several tensors of theirs joined along `dim` to one of ours; `Split` the other way round."""

    theirs: tuple[str, ...]
    ours: str
    sizes: tuple[int, ...] | None = None
    dim: int = 0

    def __post_init__(self) -> None:
        _check_alike(self.theirs, [self.ours])
        if self.sizes is not None and len(self.sizes) != len(self.theirs):
            raise ValueError(f"{self.ours}: {len(self.sizes)} sizes for {len(self.theirs)} parts")

    def forward(self, tensors: Tensors) -> None:
        """Join."""
        _join(tensors, self.theirs, self.ours, self.sizes, self.dim)

    def inverse(self, tensors: Tensors) -> None:
        """Cut."""
        _split(tensors, self.ours, self.theirs, self.sizes, self.dim)


@dataclass(frozen=True)
class Stack(Operator):
    """Tensors of theirs, one for each value 0, 1, … of the placeholder `over`, along a new `dim`.

    `Stack("layers.{layer}.experts.{expert}.w1.weight", "layers.{layer}.moe.experts.gate.weight")`
    """

    theirs: str
    ours: str
    over: str = "expert"
    dim: int = 0

    def __post_init__(self) -> None:
        _check_alike([self.theirs], [self.ours], only_left=self.over)

    def forward(self, tensors: Tensors) -> None:
        """Stack."""
        _stack(tensors, self.theirs, self.ours, self.over, self.dim)

    def inverse(self, tensors: Tensors) -> None:
        """Take apart."""
        _unstack(tensors, self.ours, self.theirs, self.over, self.dim)


@dataclass(frozen=True)
class Unstack(Operator):
    """One tensor of theirs taken apart along `dim`; `Stack` the other way round."""

    theirs: str
    ours: str
    over: str = "expert"
    dim: int = 0

    def __post_init__(self) -> None:
        _check_alike([self.ours], [self.theirs], only_left=self.over)

    def forward(self, tensors: Tensors) -> None:
        """Take apart."""
        _unstack(tensors, self.theirs, self.ours, self.over, self.dim)

    def inverse(self, tensors: Tensors) -> None:
        """Stack."""
        _stack(tensors, self.ours, self.theirs, self.over, self.dim)


@dataclass(frozen=True)
class Exact(Operator):
    """A function of whole tensors, and its exact inverse, where moving elements does not do.

    Whoever needs a region of the result reads the whole of `theirs` and computes it. Both functions
    are also called with tensors on meta.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    to_ours: Transform
    to_theirs: Transform

    def __post_init__(self) -> None:
        _check_alike(self.theirs, self.ours)

    def forward(self, tensors: Tensors) -> None:
        """Compute ours."""
        _apply(tensors, self.to_ours, self.theirs, self.ours)

    def inverse(self, tensors: Tensors) -> None:
        """Compute theirs."""
        _apply(tensors, self.to_theirs, self.ours, self.theirs)


@dataclass(frozen=True)
class Drop(Operator):
    """Tensors of theirs that carry nothing: left out, and not made again.

    repeats: the tensor that they must be equal to, such as the embedding for a tied head; whoever
    reads them compares.
    """

    theirs: str
    repeats: str | None = None

    def __post_init__(self) -> None:
        _check_alike([self.theirs], [] if self.repeats is None else [self.repeats])

    def forward(self, tensors: Tensors) -> None:
        """Leave out."""
        stated = choices([self.theirs, *([] if self.repeats is None else [self.repeats])])
        for values in list(find(self.theirs, tensors.entries, stated)):
            name = fill(self.theirs, values)
            if self.repeats is not None:
                original = fill(self.repeats, values)
                if original not in tensors.entries:
                    raise ValueError(f"{original} is missing, which {name} repeats")
                tensors.repeats[name] = tensors.entries[name], tensors.entries[original]
            tensors.drop([name])

    def inverse(self, tensors: Tensors) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Inward(Operator):
    """Operators that run on the way in alone, from other forms of their tensors to the usual ones.

    For names that folders had once and for quantised tensors, which are read and not written. They
    stand before the operators that know the usual form.
    """

    operators: tuple[Operator, ...]

    def forward(self, tensors: Tensors) -> None:
        """Run them in order."""
        for operator in self.operators:
            operator.forward(tensors)

    def inverse(self, tensors: Tensors) -> None:
        """Nothing."""


def _check_alike(left: Sequence[str], right: Sequence[str], only_left: str | None = None) -> None:
    """Check that all patterns have the same placeholders, but for one that the left alone has."""
    choices([*left, *right])
    for pattern in left:
        if only_left is not None and only_left not in placeholders(pattern):
            raise ValueError(f"pattern {pattern!r} has no {{{only_left}}} to stack over")
    sets = [set(placeholders(pattern)) - {only_left} for pattern in left]
    sets += [set(placeholders(pattern)) for pattern in right]
    for pattern, names in zip([*left, *right], sets, strict=True):
        if names != sets[0]:
            raise ValueError(
                f"patterns {left[0]!r} and {pattern!r} must have the same placeholders"
            )


def _rename(tensors: Tensors, old: str, new: str) -> None:
    values = list(find(old, tensors.entries, choices([old, new])))
    taken = [tensors.take(fill(old, value)) for value in values]
    for value, tensor in zip(values, taken, strict=True):
        tensors.put(fill(new, value), tensor.layout, tensor.dtype)


def _split(
    tensors: Tensors, whole: str, parts: Sequence[str], sizes: Sequence[int] | None, dim: int
) -> None:
    for values in list(find(whole, tensors.entries, choices([whole, *parts]))):
        name = fill(whole, values)
        tensor = tensors.take(name)
        length = _length(name, tensor.shape, dim)
        cuts = [length // len(parts)] * len(parts) if sizes is None else list(sizes)
        if sum(cuts) != length:
            what = f"{len(parts)} equal parts" if sizes is None else f"parts of {cuts}"
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: dimension {dim} is not made of {what}"
            )
        start = 0
        for part, size in zip(parts, cuts, strict=True):
            layout = tensor.layout.slice(dim, start, start + size)
            tensors.put(fill(part, values), layout, tensor.dtype)
            start += size


def _join(
    tensors: Tensors, parts: Sequence[str], whole: str, sizes: Sequence[int] | None, dim: int
) -> None:
    for values, names in find_groups(parts, tensors.entries, choices([*parts, whole])):
        found = tensors.take_alike(names)
        first = found[0].shape
        lengths = [_length(names[0], first, dim)] * len(names) if sizes is None else list(sizes)
        for name, tensor, length in zip(names, found, lengths, strict=True):
            wanted = (*first[:dim], length, *first[dim + 1 :])
            if tensor.shape != wanted:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(wanted)}")
        layout = TensorLayout.concat([tensor.layout for tensor in found], dim)
        tensors.put(fill(whole, values), layout, found[0].dtype)


def _stack(tensors: Tensors, items: str, whole: str, over: str, dim: int) -> None:
    by_whole: dict[str, dict[int, str]] = defaultdict(dict)
    for values in find(items, tensors.entries, choices([items, whole])):
        name = fill(items, values)
        if not values[over].isdecimal():
            raise ValueError(f"{name}: {values[over]!r} is no number to stack over")
        by_whole[fill(whole, values)][int(values[over])] = name
    for stacked, numbered in by_whole.items():
        for i in range(len(numbered)):
            if i not in numbered:
                raise ValueError(
                    f"{stacked} is stacked from {len(numbered)} tensors such as "
                    f"{numbered[max(numbered)]}, but number {i} is missing"
                )
        names = [numbered[i] for i in range(len(numbered))]
        found = tensors.take_alike(names)
        shape = found[0].shape
        for name, tensor in zip(names, found, strict=True):
            if tensor.shape != shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(shape)}")
        single = (*shape[:dim], 1, *shape[dim:])
        layout = TensorLayout.concat([t.layout.reshaped(single) for t in found], dim)
        tensors.put(stacked, layout, found[0].dtype)


def _unstack(tensors: Tensors, whole: str, items: str, over: str, dim: int) -> None:
    for values in list(find(whole, tensors.entries, choices([items, whole]))):
        name = fill(whole, values)
        tensor = tensors.take(name)
        shape = tensor.shape
        rest = (*shape[:dim], *shape[dim + 1 :])
        for i in range(_length(name, shape, dim)):
            layout = tensor.layout.slice(dim, i, i + 1).reshaped(rest)
            tensors.put(fill(items, {**values, over: str(i)}), layout, tensor.dtype)


def _apply(tensors: Tensors, transform: Transform, old: Sequence[str], new: Sequence[str]) -> None:
    for values, names in find_groups(old, tensors.entries, choices([*old, *new])):
        tensors.apply(transform, names, [fill(pattern, values) for pattern in new])


def _length(name: str, shape: Sequence[int], dim: int) -> int:
    if not 0 <= dim < len(shape):
        raise ValueError(f"{name} has shape {list(shape)}, and no dimension {dim}")
    return shape[dim]
