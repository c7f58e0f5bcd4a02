"""How the features and the vocabulary of a layer are cut over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mcore_parallel.group import Group
from mcore_parallel.layout import Box, TensorLayout
from mcore_parallel.spec import GradSync, Init, ParamSpec

__all__ = [
    "Part",
    "VocabShard",
    "check_divisible",
    "check_parts",
    "fused_spec",
    "padded_vocab_size",
]


@dataclass(frozen=True)
class Part:
    """One of the output parts of a fused column-parallel layer, such as q, k or v.

    `units` heads (or groups, or features) of `unit_size` features each. A unit is never cut: the
    units are dealt out over the ranks, or, where there are fewer units than ranks, each unit is
    held by the size // units consecutive ranks that share it.
    """

    name: str
    units: int
    unit_size: int = 1

    @property
    def features(self) -> int:
        """Number of output features over all ranks."""
        return self.units * self.unit_size

    def fits(self, size: int) -> bool:
        """Whether the units can be dealt out over (or shared by) `size` ranks."""
        return self.units % size == 0 or size % self.units == 0

    def num_replicas(self, size: int) -> int:
        """How many of `size` ranks hold the same units."""
        return max(1, size // self.units)

    def start(self, group: Group) -> int:
        """The first feature held by my rank of the group."""
        return group.rank // self.num_replicas(group.size) * self.local_features(group.size)

    def local_features(self, size: int) -> int:
        """The number of features held by each of `size` ranks."""
        return max(1, self.units // size) * self.unit_size

    def layout(self, name: str, group: Group, columns: tuple[int, ...] = ()) -> TensorLayout:
        """The layout of my rows of the global tensor `name` [features, *columns]."""
        box = Box((self.start(group), *(0 for _ in columns)),
                  (self.local_features(group.size), *columns))  # fmt: skip
        count = self.num_replicas(group.size)
        layout = TensorLayout.box(name, (self.features, *columns), box)
        return layout.replicated(group.rank % count, count)


def fused_spec(
    parts: Mapping[str, Part],
    group: Group,
    columns: tuple[int, ...] = (),
    *,
    init: Init,
    decay: bool | None = None,
    fp32: bool = False,
) -> ParamSpec:
    """The spec of a parameter that holds my rows of several parts, one part after the other.

    `parts` are in their local order, by the names of their global tensors [features, *columns]. The
    gradient of a part that several ranks hold is a partial sum over these (made by
    `group.split`). `decay` None: as `ParamSpec` decides; `fp32` as there.
    """
    layouts: list[TensorLayout] = []
    sync: list[GradSync] = []
    start = 0
    for name, part in parts.items():
        layout = part.layout(name, group, columns)
        replicas = part.num_replicas(group.size)
        if replicas > 1:
            shared_by = group.split(replicas)
            sync.append(GradSync(group=shared_by, start=start, stop=start + layout.numel))
        start += layout.numel
        layouts.append(layout)
    decides = {} if decay is None else {"decay": decay}
    return ParamSpec(
        layout=TensorLayout.concat(layouts),
        init=init,
        grad_sync=tuple(sync),
        fp32=fp32,
        **decides,
    )


def check_parts(layer: str, parts: Sequence[Part], size: int) -> None:
    """Raise ValueError when some part has no way over `size` ranks, naming the nearest size."""
    for part in parts:
        if part.units < 1 or part.unit_size < 1:
            raise ValueError(
                f"{layer}: part {part.name!r} has {part.units} units of {part.unit_size} features; "
                f"both must be at least 1"
            )
    for part in parts:
        if not part.fits(size):
            relation = "divisible by" if part.units > size else "a divisor of"
            nearest = _nearest(size, lambda n: all(p.fits(n) for p in parts))
            raise ValueError(
                f"{layer}: part {part.name!r} has {part.units} units, which is not {relation} "
                f"tp={size}; the nearest valid tp is {nearest}"
            )


def check_divisible(layer: str, what: str, count: int, size: int) -> None:
    """Raise ValueError when `size` ranks do not divide `count`, naming the nearest size."""
    if count < 1:
        raise ValueError(f"{layer}: {what} is {count}, must be at least 1")
    if count % size:
        nearest = _nearest(size, lambda n: count % n == 0)
        raise ValueError(
            f"{layer}: {what} is {count}, which is not divisible by tp={size}; "
            f"the nearest valid tp is {nearest}"
        )


def check_tokens(layer: str, tokens: int, size: int) -> None:
    """Raise ValueError when sequence parallelism cannot cut `tokens` rows over `size` ranks."""
    if tokens % size:
        below = tokens - tokens % size
        nearest = below if below and tokens - below <= size // 2 else below + size
        raise ValueError(
            f"{layer}: sequence parallelism cannot cut {tokens} tokens over tp={size}; "
            f"the nearest valid number is {nearest}"
        )


def _nearest(size: int, valid: Callable[[int], bool]) -> int:
    """The valid degree nearest to `size`, the smaller of two equally near; 1 always is valid."""
    for distance in range(1, size):
        for candidate in (size - distance, size + distance):
            if valid(candidate):
                return candidate
    return 1


def padded_vocab_size(vocab_size: int, tp: int, multiple_of: int = 1) -> int:
    """The least multiple of tp · multiple_of that is at least `vocab_size`."""
    if vocab_size < 1 or multiple_of < 1:
        raise ValueError(
            f"vocabulary of {vocab_size} padded to a multiple of {multiple_of}: "
            f"both must be at least 1"
        )
    step = tp * multiple_of
    return (vocab_size + step - 1) // step * step


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """The rows [start, start + rows) of a padded vocabulary that one rank holds.

    The first `real` of them stand for tokens, the others are padding.
    """

    vocab_size: int
    rows: int
    start: int

    @staticmethod
    def of(vocab_size: int, group: Group, multiple_of: int = 1) -> VocabShard:
        """The shard of my rank when every rank holds the same number of rows."""
        rows = padded_vocab_size(vocab_size, group.size, multiple_of) // group.size
        return VocabShard(vocab_size=vocab_size, rows=rows, start=rows * group.rank)

    @staticmethod
    def of_logits(vocab_size: int, columns: int, group: Group) -> VocabShard:
        """The shard of my rank, given its number of columns; ValueError when they are too few."""
        if columns * group.size < vocab_size:
            raise ValueError(
                f"vocabulary of {vocab_size} does not fit {columns} columns on each of tp="
                f"{group.size} ranks; at least {padded_vocab_size(vocab_size, group.size)} in all"
            )
        return VocabShard(vocab_size=vocab_size, rows=columns, start=columns * group.rank)

    @property
    def real(self) -> int:
        """Number of rows that stand for tokens."""
        return min(max(self.vocab_size - self.start, 0), self.rows)

    def layout(self, name: str, columns: tuple[int, ...] = ()) -> TensorLayout:
        """The layout of the local rows [rows, *columns]: padding rows belong to no tensor."""
        start = min(self.start, self.vocab_size)
        box = Box((start, *(0 for _ in columns)), (self.real, *columns))
        real = TensorLayout.box(name, (self.vocab_size, *columns), box)
        padding = TensorLayout.padding((self.rows - self.real, *columns))
        return TensorLayout.concat((real, padding))
