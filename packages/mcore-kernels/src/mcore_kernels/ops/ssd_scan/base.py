"""What the implementations of the scan share: checks, step sizes, rows of documents in a grid.

Shapes: T tokens, N documents, h heads of size P, G groups, S state size; R lines of K chunks of L
rows each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_kernels.protocols import accumulation_dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """The rows of packed documents dealt into `lines` of `chunks` chunks of `length` rows.

    A chunk holds rows of one document alone and is filled up with rows of zeros. Either a line is
    a document (`document` is None), or there is one line, in which chunk k belongs to
    `document[k]` (N for a chunk without rows) and the chunks of a document follow each other.

    source [lines · chunks · length]: the row that lies there, T for none; None where line n holds
    just the rows n·S … (n+1)·S - 1 (`samples` = S). place [T]: its inverse, past the end for rows
    of no document. last [N]: the last chunk of each document, -1 for an empty one.
    """

    lines: int
    chunks: int
    length: int
    samples: int = 0
    source: Tensor | None = None
    place: Tensor | None = None
    document: Tensor | None = None
    last: Tensor | None = None

    def deal(self, x: Tensor) -> Tensor:
        """x [T, …] → [R, K, L, …]."""
        shape = (self.lines, self.chunks, self.length, *x.shape[1:])
        if self.source is not None:
            rows = torch.cat((x, x.new_zeros(1, *x.shape[1:]))).index_select(0, self.source)
            return rows.view(shape)
        rows = x.reshape(self.lines, self.samples, *x.shape[1:])
        spare = self.chunks * self.length - self.samples
        if spare:
            rows = F.pad(rows, (*(0, 0) * (x.dim() - 1), 0, spare))
        return rows.reshape(shape)

    def collect(self, y: Tensor) -> Tensor:
        """The inverse of `deal`: y [R, K, L, …] → [T, …], zeros for rows of no document."""
        if self.place is not None:
            y = y.flatten(0, 2)
            return torch.cat((y, y.new_zeros(1, *y.shape[1:]))).index_select(0, self.place)
        return y.flatten(1, 2)[:, : self.samples].flatten(0, 1)


def make_grid(
    num_rows: int,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    uniform: tuple[int, int] | None,
    chunk_size: int,
) -> Grid:
    """Deal documents into chunks of at most `chunk_size` rows; reads nothing back from a device.

    A document is a line of its own when all are equally long or none is longer than a chunk;
    otherwise lines of the longest document's size might be mostly empty.
    """
    count = cu_seqlens.shape[0] - 1
    if uniform is not None:
        length = max(1, min(chunk_size, uniform[1]))
        chunks = max(1, -(-uniform[1] // length))
        return Grid(lines=count, chunks=chunks, length=length, samples=uniform[1])
    bounds = cu_seqlens.long()
    token = torch.arange(num_rows, device=cu_seqlens.device)
    document = torch.searchsorted(bounds[1:], token, right=True)
    offset = token - bounds[document]
    length = max(1, min(chunk_size, max_seqlen))
    if max_seqlen <= chunk_size:
        position = torch.arange(length, device=bounds.device)
        rows = bounds[:-1, None] + position
        source = torch.where(rows < bounds[1:, None], rows, num_rows).flatten()
        place = torch.where(document < count, document * length + offset, count * length)
        return Grid(lines=count, chunks=1, length=length, source=source, place=place)
    return _one_line(bounds, num_rows, length, document, offset)


def _one_line(bounds: Tensor, num_rows: int, length: int, document: Tensor, offset: Tensor) -> Grid:
    """All chunks in one line: as many as any documents of so many rows could need."""
    count = bounds.shape[0] - 1
    needed = (bounds.diff() + length - 1) // length
    ends = needed.cumsum(0)
    first = torch.cat((ends - needed, ends[-1:]))
    chunks = (num_rows + count * (length - 1)) // length
    chunk = torch.arange(chunks, device=bounds.device)
    owner = torch.searchsorted(ends, chunk, right=True)
    rows = (bounds[owner] + (chunk - first[owner]) * length)[:, None]
    rows = rows + torch.arange(length, device=bounds.device)
    stop = torch.cat((bounds[1:], bounds[:1]))[owner][:, None]  # nothing lies beyond the last
    source = torch.where(rows < stop, rows, num_rows).flatten()
    place = first[document] * length + offset
    place = torch.where(document < count, place, chunks * length)
    last = torch.where(needed > 0, ends - 1, -1)
    return Grid(
        lines=1,
        chunks=chunks,
        length=length,
        source=source,
        place=place,
        document=owner,
        last=last,
    )


def carry(
    grid: Grid, step: Callable[[int, Tensor], Tensor], nothing: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The states before each chunk [R, K, …], and after the last of each document [N, …].

    step: a chunk's number and the states [R, …] before it, to those behind it; called in order.
    nothing [R, …]: the states of documents that begin, where there are none in `initial` [N, …].
    """
    if initial is not None:
        initial = initial.to(nothing.dtype)
    if grid.document is None:
        state = nothing if initial is None else initial
        before = []
        for k in range(grid.chunks):
            before.append(state)
            state = step(k, state)
        return torch.stack(before, 1), state
    assert grid.last is not None
    known = nothing.expand(grid.last.shape[0], *nothing.shape[1:]) if initial is None else initial
    at_start = torch.cat((known, nothing)).index_select(0, grid.document).unsqueeze(1)
    starts = grid.document.diff(prepend=grid.document.new_full((1,), -1)) != 0
    before, after = [], [nothing]
    for k in range(grid.chunks):
        before.append(torch.where(starts[k], at_start[k], after[-1]))
        after.append(step(k, before[-1]))
    states = torch.cat(after[1:]).index_select(0, grid.last.clamp(min=0))
    ended = (grid.last >= 0).view(-1, *[1] * (states.dim() - 1))
    return torch.stack(before, 1), torch.where(ended, states, known)


def step_sizes(dt: Tensor, dt_bias: Tensor | None, limits: tuple[float, float]) -> Tensor:
    """Δ [T, h] in the accumulation dtype."""
    step = dt.to(accumulation_dtype(dt.dtype))
    if dt_bias is not None:
        step = step + dt_bias.to(step.dtype)
    # torch's own threshold of 20 is a rounding error in float32, but not in float64.
    return F.softplus(step, threshold=40.0).clamp(*limits)


def check(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    cu_seqlens: Tensor,
    uniform: tuple[int, int] | None,
    d: Tensor | None,
    dt_bias: Tensor | None,
    dt_limits: tuple[float, float],
    initial_states: Tensor | None,
    chunk_size: int,
) -> None:
    """ValueError for arguments that do not fit together."""
    rows, heads, size = x.shape
    count = cu_seqlens.shape[0] - 1
    if chunk_size < 1:
        raise ValueError(f"ssd_scan: chunk_size must be at least 1, got {chunk_size}")
    if not 0 <= dt_limits[0] <= dt_limits[1]:
        raise ValueError(f"ssd_scan: dt_limits {dt_limits} must rise from at least 0")
    if b.dim() != 3 or b.shape != c.shape:
        raise ValueError(
            f"ssd_scan: b and c are both [rows, groups, state], got {list(b.shape)} and "
            f"{list(c.shape)}"
        )
    if heads % b.shape[1]:
        raise ValueError(
            f"ssd_scan: the number of groups must divide that of heads, got {b.shape[1]} and "
            f"{heads}"
        )
    if dt.shape != (rows, heads) or b.shape[0] != rows:
        raise ValueError(
            f"ssd_scan: x has {rows} rows of {heads} heads, dt is {list(dt.shape)} and b has "
            f"{b.shape[0]} rows"
        )
    for name, value in (("a_log", a_log), ("d", d), ("dt_bias", dt_bias)):
        if value is not None and value.shape != (heads,):
            raise ValueError(
                f"ssd_scan: {name} has one number for each of {heads} heads, got "
                f"{list(value.shape)}"
            )
    states = (count, heads, size, b.shape[2])
    if initial_states is not None and initial_states.shape != states:
        raise ValueError(
            f"ssd_scan: {count} documents have initial states {list(states)}, got "
            f"{list(initial_states.shape)}"
        )
    if uniform is not None and (uniform[0] != count or uniform[0] * uniform[1] != rows):
        raise ValueError(
            f"ssd_scan: uniform={uniform} means {uniform[0] * uniform[1]} rows of {uniform[0]} "
            f"documents, got {rows} rows of {count}"
        )
