"""`LiveTransfer`: from the tensors of one set of layouts into those of another, in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_ckpt.agreement import together
from mcore_ckpt.alike import digest_of, split
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.live.own import Kind, Own, Side, own_copies
from mcore_ckpt.live.rounds import Pairs, Piece, Round, Schedule, encode_loads, schedule
from mcore_ckpt.live.staging import Staged, as_bytes, checksum, view
from mcore_ckpt.live.transport import Transport, open_transport, pick_transport
from mcore_ckpt.planning import describe
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor

DEFAULT_STAGING_BYTES = 256 << 20


class PlanCache:
    """Schedules of transfers by what they are between, for links that are made more than once.

    Every rank passes its own to `LiveTransfer`. limit: schedules kept, the last used ones.
    """

    def __init__(self, limit: int = 8) -> None:
        if limit < 1:
            raise ValueError(f"limit is {limit}; nearest valid: 1")
        self.limit = limit
        self.hits = 0
        self._kept: dict[str, Schedule] = {}

    def find(self, key: str) -> Schedule | None:
        """Return the schedule kept under a key, None when there is none."""
        found = self._kept.pop(key, None)
        if found is not None:
            self._kept[key] = found
        return found

    def keep(self, key: str, made: Schedule) -> None:
        """Keep a schedule, and drop the one that was used longest ago when there are too many."""
        self._kept[key] = made
        while len(self._kept) > self.limit:
            del self._kept[next(iter(self._kept))]


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What one call moved to and from this rank: bytes that crossed ranks, in how many rounds."""

    sent_bytes: int
    received_bytes: int
    num_rounds: int


class LiveTransfer:
    """The way from tensors of some ranks into those of others, or of the same, planned once.

    Every call moves what the sources hold at that moment into the targets, in place: from the
    trainer's layout into the engine's, on the same ranks or on others, converting between
    floating-point types with one rounding. Elements cross in the smaller dtype of both ends. What
    lies on the target's own rank is copied there and crosses nothing.

    A rank stages at most `max_bytes` for sending and as much for receiving at one time, however
    large the tensors are (and what the transport itself needs).

    Every rank of `group` constructs it and calls it, also one that only gives or only takes.
    Metadata crosses over the group's CPU twin.

    Args:
        sources: this rank's tensors to move from, by any local key. They and the targets are kept
            and must go on living where they are; no element may be in a fragment of both.
        targets: this rank's tensors to fill. Their padding is left alone.
        group: all ranks that give or take.
        transport: a `Transport` over this group, or the name of one (see `open_transport`), which
            `close` then closes. Default: NCCL where all tensors of all ranks are on GPUs and the
            group has it, else gloo.
        max_bytes: bound on staging, the same on every rank.
        plans: kept schedules: the second link between the same layouts is not planned again.

    Raises:
        ValueError: on every rank: a target needs elements that no source holds, shapes differ, a
            dtype does not convert, or a tensor is not contiguous; names the tensor.
    """

    def __init__(
        self,
        sources: Mapping[str, LayoutTensor],
        targets: Mapping[str, LayoutTensor],
        group: Group,
        *,
        transport: Transport | str | None = None,
        max_bytes: int = DEFAULT_STAGING_BYTES,
        plans: PlanCache | None = None,
    ) -> None:
        self.group = group
        self._sources = {key: value.tensor for key, value in sources.items()}
        self._targets = {key: value.tensor for key, value in targets.items()}
        self.schedule = _find_schedule(sources, targets, group, max_bytes, plans)
        self._owned = transport is None or isinstance(transport, str)
        if transport is None:
            tensors = (*self._sources.values(), *self._targets.values())
            transport = pick_transport(group, on_gpu=all(x.is_cuda for x in tensors))
        self.transport = (
            open_transport(transport, group) if isinstance(transport, str) else transport
        )

    def __call__(self, *, verify: bool = False) -> Moved:
        """Move the values; every rank of the group calls it.

        verify: send a checksum with every piece, compare it where it arrives, and compare what was
            written, bit for bit, with what arrived.

        Raises:
            ValueError: on every rank: some verify and some do not.
            CheckpointError: on every rank: verification failed; names the tensor and the ranks.
                Targets may have been filled by then.
            RuntimeError: the transport failed.
        """
        what = "moving tensors failed"
        asked = together(self.group.cpu, what, lambda: bool(verify))
        if len(set(asked)) > 1:
            verifying = [rank for rank, on in zip(self.group.ranks, asked, strict=True) if on]
            raise ValueError(f"verify is set on ranks {verifying} alone; set it on all or none")
        wrong: list[str] = []
        with torch.no_grad():
            for copy in self.schedule.local:
                source = view(self._sources, copy.source, copy)
                target = view(self._targets, copy.target, copy)
                target.copy_(source)
                if verify and not _same(target, source):
                    wrong.append(f"{copy.name} {copy.box} was not written as it was read")
            for batch in self.schedule.rounds:
                wrong += self._run(batch, verify)
        if verify:
            together(self.group.cpu, what, lambda: _raise_first(wrong))
        return Moved(
            sent_bytes=self.schedule.sent_bytes,
            received_bytes=self.schedule.received_bytes,
            num_rounds=len(self.schedule.rounds),
        )

    def close(self) -> None:
        """Close the transport if it was opened here; every rank calls it."""
        if self._owned:
            self.transport.close()

    def _run(self, batch: Round, verify: bool) -> list[str]:
        """Carry out one round; return what verification found wrong on this rank."""
        device = self.transport.device
        outgoing = Staged(batch.outgoing, self.group.ranks, verify)
        incoming = Staged(batch.incoming, self.group.ranks, verify)
        buffer = torch.zeros(outgoing.num_bytes, dtype=torch.uint8, device=device)
        for piece, elements, crc in outgoing.views(buffer):
            elements.copy_(view(self._sources, piece.copy.source, piece.copy))
            if verify:
                crc.copy_(checksum(elements))
        received = self.transport.exchange(buffer, outgoing.sizes, incoming.sizes)
        wrong = []
        for piece, elements, crc in incoming.views(received):
            target = view(self._targets, piece.copy.target, piece.copy)
            target.copy_(elements)
            if verify and not torch.equal(crc.cpu(), checksum(elements)):
                wrong.append(f"{_where(piece)} did not arrive as it was sent")
            elif verify and not _same(target, elements):
                wrong.append(f"{_where(piece)} was not written as it arrived")
        return wrong


def _where(piece: Piece) -> str:
    copy = piece.copy
    return f"{copy.name} {copy.box} from rank {copy.source.rank} to rank {copy.target.rank}"


def _same(target: torch.Tensor, source: torch.Tensor) -> bool:
    expected = source.to(dtype=target.dtype, device=target.device)
    if torch.equal(as_bytes(target), as_bytes(expected)):
        return True
    if source.dtype == target.dtype or not target.is_floating_point():
        return False
    # Through another dtype a NaN stays one, but which bits it gets depends on how it lies.
    one, other = target.double(), expected.double()
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _raise_first(wrong: list[str]) -> None:
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise CheckpointError(wrong[0] + more)


def _find_schedule(
    sources: Mapping[str, LayoutTensor],
    targets: Mapping[str, LayoutTensor],
    group: Group,
    max_bytes: int,
    plans: PlanCache | None,
) -> Schedule:
    what = "planning a transfer failed"
    sides: list[dict[str, Any]] = []

    def prepare() -> list[Any]:
        if max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}; nearest valid: 1")
        for values in (sources, targets):
            for key, value in values.items():
                if not value.tensor.is_contiguous():
                    raise ValueError(f"{key}: cannot move a tensor that is not contiguous")
        sides.extend(split(describe(values))[0] for values in (sources, targets))
        return [max_bytes, *map(digest_of, sides)]

    rows = together(group.cpu, what, prepare)
    bounds = {row[0] for row in rows}
    if len(bounds) > 1:
        raise ValueError(f"max_bytes differs between ranks: {sorted(bounds)}")
    key = hashlib.sha256(json.dumps([group.rank, group.ranks, rows]).encode()).hexdigest()
    kept = plans.find(key) if plans is not None else None
    if plans is not None and all(together(group.cpu, what, lambda: kept is not None)):
        assert kept is not None
        plans.hits += 1
        return kept
    kinds = _find_kinds([tuple(row[1:]) for row in rows], sides, group, what)
    made = _plan(kinds, group, max_bytes, what)
    if plans is not None:
        plans.keep(key, made)
    return made


def _find_kinds(
    digests: Sequence[tuple[str, str]],
    sides: Sequence[Mapping[str, Any]],
    group: Group,
    what: str,
) -> list[Kind]:
    """Return the kinds of ranks; of those that hold the same on a side the first describes it."""
    own = digests[group.rank]
    first = [
        next(rank for rank, of_rank in enumerate(digests) if of_rank[side] == own[side])
        for side in range(2)
    ]
    mine = [held if rank == group.rank else None for held, rank in zip(sides, first, strict=True)]
    described: list[list[Any]] = together(group.cpu, what, lambda: mine)
    known: list[dict[str, Side]] = [{}, {}]
    members: dict[tuple[str, str], list[int]] = {}
    for rank, of_rank, rows in zip(group.ranks, digests, described, strict=True):
        members.setdefault(of_rank, []).append(rank)
        for digest, row, by_digest in zip(of_rank, rows, known, strict=True):
            if row is not None:
                by_digest[digest] = Side(row)
    return [
        Kind(ranks=tuple(ranks), sources=known[0][giving], targets=known[1][taking])
        for (giving, taking), ranks in members.items()
    ]


def _plan(kinds: Sequence[Kind], group: Group, max_bytes: int, what: str) -> Schedule:
    """Plan this rank's part; every rank calls it, and all raise the error of one."""
    rank = group.ranks[group.rank]
    found: list[Own] = []

    def plan() -> str:
        found.append(own_copies(kinds, rank))
        return encode_loads(found[0], group.ranks, max_bytes)

    pairs = Pairs(together(group.cpu, what, plan))
    return schedule(found[0], pairs, group.ranks, rank, max_bytes)
