"""The zigzag split of a sequence, or of packed documents, over the ranks of context parallelism.

With n ranks every document is cut into 2 · n equal chunks, and rank r holds chunks r and
2 · n - 1 - r: an early and a late one, so that under a causal mask all ranks have the same work
(the pairing of "The Llama 3 Herd of Models", 2024, section 3.3.2).

T rows of all ranks together, t = T / n of one; a row is a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mcore_parallel.collectives import all_gather
from mcore_parallel.group import Group

__all__ = ["DocumentPadding", "SequenceSplit", "padded_length"]


def padded_length(length: int, size: int) -> int:
    """The least length of at least `length` that `size` ranks can share: a multiple of 2 · size.

    A single rank shares with nobody and takes any length.
    """
    unit = _unit(size)
    return -(-length // unit) * unit


@dataclass(frozen=True, kw_only=True)
class SequenceSplit:
    """Which rows of a sequence each rank holds.

    bounds: where the documents begin and end, from 0 to T; size: the number of ranks. Each rank
    holds its two chunks of the first document, then of the second, and so on; a rank's documents
    have the bounds `local_bounds`, the same on every rank.

    Raises:
        ValueError: bounds that do not rise from 0, or a document whose length is no multiple of
            2 · size; `DocumentPadding` makes it one.
    """

    bounds: tuple[int, ...]
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"context parallel size is {self.size}, must be at least 1")
        rising = all(a <= b for a, b in pairwise(self.bounds))
        if len(self.bounds) < 2 or self.bounds[0] != 0 or not rising:
            raise ValueError(
                f"bounds of documents must rise from 0; they are {_short(self.bounds)}"
            )
        unit = _unit(self.size)
        for index, (start, stop) in enumerate(pairwise(self.bounds)):
            if (length := stop - start) % unit:
                below = length // unit * unit
                near = f"{below} and {below + unit}" if below else f"{unit}"
                raise ValueError(
                    f"document {index} of length {length} cannot be cut into 2 × cp = "
                    f"2 × {self.size} = {unit} chunks; nearest valid lengths: {near}"
                )

    @staticmethod
    def of_samples(samples: int, length: int, size: int) -> SequenceSplit:
        """The split of a batch of equally long samples, each of which is one document."""
        return SequenceSplit(bounds=tuple(range(0, samples * length + 1, length)), size=size)

    @property
    def num_rows(self) -> int:
        """Rows of all ranks, T."""
        return self.bounds[-1]

    @property
    def local_bounds(self) -> tuple[int, ...]:
        """The bounds of the documents in the rows of any one rank, from 0 to t."""
        return tuple(bound // self.size for bound in self.bounds)

    def rows(self, rank: int) -> Tensor:
        """The rows that `rank` holds, int64 [t] in its order."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not one of the {self.size} ranks of the split")
        if self.size == 1:
            return torch.arange(self.num_rows)
        mine = []
        for start, stop in pairwise(self.bounds):
            chunk = (stop - start) // (2 * self.size)
            for index in (rank, 2 * self.size - 1 - rank):
                mine.append(torch.arange(chunk) + start + index * chunk)
        return torch.cat(mine)

    def take(self, x: Tensor, rank: int, dim: int = 0) -> Tensor:
        """The share of `rank` of `x`, whose dimension `dim` has T rows; differentiable."""
        self._check(x, dim, self.num_rows, "of all ranks")
        return x.index_select(dim, self.rows(rank).to(x.device))

    def join(self, shares: Sequence[Tensor], dim: int = 0) -> Tensor:
        """The whole from every rank's share, in rank order: the inverse of `take`."""
        if len(shares) != self.size:
            raise ValueError(f"got {len(shares)} shares of a split over {self.size} ranks")
        for share in shares:
            self._check(share, dim, self.num_rows // self.size, "of one rank")
        whole = torch.cat(list(shares), dim)
        return whole.index_select(dim, self.order().to(whole.device))

    def gather(self, x: Tensor, group: Group, dim: int = 0) -> Tensor:
        """The whole from my share `x`, on every rank of `group`, over which it communicates.

        No gradient flows through it.
        """
        if group.size != self.size:
            raise ValueError(
                f"group {group.name!r} of {group.size} ranks cannot gather a split over {self.size}"
            )
        self._check(x, dim, self.num_rows // self.size, "of one rank")
        with torch.no_grad():
            return all_gather(x, group, dim).index_select(dim, self.order().to(x.device))

    def order(self) -> Tensor:
        """Where each row lies when the ranks' rows stand one after another: int64 [T]."""
        held = torch.cat([self.rows(rank) for rank in range(self.size)])
        order = torch.empty_like(held)
        order[held] = torch.arange(self.num_rows)
        return order

    def _check(self, x: Tensor, dim: int, rows: int, whose: str) -> None:
        if x.shape[dim] != rows:
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} has not the {rows} rows {whose} along "
                f"dimension {dim}"
            )


@dataclass(frozen=True, kw_only=True)
class DocumentPadding:
    """Documents made long enough for the ranks to share: rows are added at the end of each.

    lengths: of the documents; size: the number of ranks. Under a causal mask the added rows are
    seen by no real one; without it attention has to be told the lengths (`ContextAttentionOp`).
    """

    lengths: tuple[int, ...]
    size: int

    def __post_init__(self) -> None:
        if self.size < 1 or min(self.lengths, default=0) < 0:
            raise ValueError(
                f"lengths {_short(self.lengths)} over {self.size} ranks: lengths must not be "
                f"negative and the number of ranks not below 1"
            )

    @property
    def split(self) -> SequenceSplit:
        """The split of the padded documents."""
        padded = (padded_length(length, self.size) for length in self.lengths)
        return SequenceSplit(bounds=(0, *accumulate(padded)), size=self.size)

    def rows(self) -> Tensor:
        """Where each real row lies among the padded ones, int64 [sum of the lengths]."""
        starts = self.split.bounds
        parts = [torch.arange(n) + start for n, start in zip(self.lengths, starts, strict=False)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def pad(self, x: Tensor, value: float = 0) -> Tensor:
        """`x` [sum of the lengths, …] with rows of `value` added; differentiable."""
        if x.shape[0] != sum(self.lengths):
            raise ValueError(
                f"a tensor of {x.shape[0]} rows does not hold documents of {sum(self.lengths)} rows"
            )
        padded = x.new_full((self.split.num_rows, *x.shape[1:]), value)
        return padded.index_copy(0, self.rows().to(x.device), x)

    def unpad(self, x: Tensor) -> Tensor:
        """The real rows of the padded `x`: the inverse of `pad`; differentiable."""
        return x.index_select(0, self.rows().to(x.device))


def _unit(size: int) -> int:
    return 1 if size == 1 else 2 * size


def _short(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, values[:6]))
    return f"[{shown}, …]" if len(values) > 6 else f"[{shown}]"
