"""What a rank knows of its rows: the documents in them, and where its chunks stand."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

import torch
from torch import Tensor

from mcore_parallel.context.blocks import Chunk

__all__ = [
    "Documents",
    "LastPlan",
    "chunks_of",
    "document_order",
    "holders",
    "local_documents",
    "real_rows",
    "whole_lengths",
]

P = TypeVar("P")

Documents = tuple[range, ...]
"""The rows of each document, among those of this rank."""


def local_documents(
    cu_seqlens: tuple[Tensor, Tensor], uniform: tuple[int, int] | None, rows: tuple[int, int]
) -> Documents:
    """Return the documents of this rank's rows; reads them from the device unless `uniform`.

    cu_seqlens, rows: those of queries and keys.

    Raises:
        ValueError: queries and keys are cut differently, the documents do not fit the rows, or
            one has an odd number of rows here, so that it is not two chunks of equal length.
    """
    if uniform is not None:
        samples, length = uniform
        bounds = list(range(0, samples * length + 1, length)) if length else [0]
    else:
        bounds = cu_seqlens[0].tolist()
        same = cu_seqlens[0] is cu_seqlens[1] or bounds == cu_seqlens[1].tolist()
        if not same:
            raise ValueError(
                "context parallel attention: queries and keys must be the same documents; "
                "their cu_seqlens differ"
            )
    if rows[0] != rows[1] or bounds[-1] > rows[0]:
        raise ValueError(
            f"context parallel attention: documents end at row {bounds[-1]}, and there are "
            f"{rows[0]} rows of queries and {rows[1]} of keys"
        )
    documents = tuple(range(start, stop) for start, stop in pairwise(bounds))
    for index, document in enumerate(documents):
        if len(document) % 2:
            raise ValueError(
                f"context parallel attention: document {index} has {len(document)} rows on this "
                f"rank and must have two equal chunks: {len(document) - 1} or {len(document) + 1}"
            )
    return documents


def whole_lengths(
    documents: Documents, size: int, lengths: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the lengths of the whole documents over `size` ranks, as given or as the rows say.

    lengths: without the rows that were added to share them; None: there are none.

    Raises:
        ValueError: not one for each document, or one that its rows cannot hold.
    """
    room = tuple(len(document) * size for document in documents)
    if lengths is None:
        return room
    fits = len(lengths) == len(room)
    if not (fits and all(0 <= a <= b for a, b in zip(lengths, room, strict=True))):
        raise ValueError(
            f"context parallel attention: lengths {list(lengths[:6])} of {len(lengths)} documents "
            f"in rows for {list(room[:6])} of {len(room)}: give one for each, at most its rows"
        )
    return tuple(lengths)


def chunks_of(
    document: range, rank: int, size: int, length: int | None = None
) -> tuple[Chunk, Chunk]:
    """Return the two chunks of a document that rank `rank` of `size` holds in these rows.

    length: of the whole document, where later rows are to be left out.
    """
    half = len(document) // 2
    early, late = rank * half, (2 * size - 1 - rank) * half
    end = len(document) * size if length is None else length
    return (
        Chunk(range(early, _between(early, end, early + half)), document.start),
        Chunk(range(late, _between(late, end, late + half)), document.start + half),
    )


def real_rows(document: range, rank: int, size: int, length: int) -> range:
    """Return the rows of both chunks that positions up to `length` lie in: the first ones.

    A late chunk has some only where the early one is full.
    """
    early, late = chunks_of(document, rank, size, length)
    count = len(early.positions) + len(late.positions)
    return range(document.start, document.start + count)


def _between(low: int, value: int, high: int) -> int:
    return min(max(low, value), high)


def holders(document: range, positions: range, size: int) -> tuple[Tensor, Tensor]:
    """Return which of `size` ranks holds each position of a document, and in which of its rows.

    document: its rows on any of the ranks. Both int64 [positions].
    """
    length, place = len(document) // 2, torch.arange(positions.start, positions.stop)
    chunk = place // length
    late = chunk >= size
    rank = torch.where(late, 2 * size - 1 - chunk, chunk)
    return rank, document.start + place % length + late * length


def document_order(documents: Documents, num_rows: int, size: int) -> Tensor:
    """Where the rows of `size` neighbouring ranks go, when they stand one rank after another.

    Returns int64 [size · num_rows]: taking these rows puts every document in the order of its
    positions, as one rank of a split over fewer would hold it. Rows of no document come last.
    """
    taken = []
    for document in documents:
        half = len(document) // 2
        early = torch.arange(document.start, document.start + half)
        late = torch.arange(document.start + half, document.stop)
        taken += [early + rank * num_rows for rank in range(size)]
        taken += [late + rank * num_rows for rank in reversed(range(size))]
    rest = torch.arange(documents[-1].stop if documents else 0, num_rows)
    taken += [rest + rank * num_rows for rank in range(size)]
    return torch.cat(taken)


class LastPlan(Generic[P]):
    """The plan of the last batch: the layers of a micro-batch ask for the same one in turn."""

    def __init__(self) -> None:
        self._asked: tuple[Tensor | None, Tensor | None, Hashable] | None = None
        self._plan: P | None = None

    def get(
        self,
        cu_seqlens: tuple[Tensor, Tensor],
        uniform: tuple[int, int] | None,
        key: Hashable,
        make: Callable[[], P],
    ) -> P:
        """Return `make()`, or what it returned last if nothing has changed since.

        A tensor counts as unchanged when it is the same object in the same version. One made in
        inference mode has no version, and never counts as that.
        """
        tensors = (None, None) if uniform is not None else cu_seqlens
        versions = tuple(None if x is None else _version(x) for x in tensors)
        key = (key, uniform, versions)
        asked, plan = self._asked, self._plan
        if plan is not None and asked is not None:
            q, k, old = asked
            if q is tensors[0] and k is tensors[1] and old == key:
                return plan
        plan = make()
        self._asked, self._plan = (*tensors, key), plan
        return plan


def _version(x: Tensor) -> Hashable:
    return object() if x.is_inference() else x._version
