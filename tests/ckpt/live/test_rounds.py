"""Rounds: every element once, bounded, and not one rank after the other."""

from collections import Counter, defaultdict

import pytest
import torch

from mcore_ckpt.live.own import Own, Wire
from mcore_ckpt.live.rounds import Pairs, Schedule, cut, encode_loads, schedule
from mcore_parallel.layout import Copy, TensorLayout, plan

N = 4
WHOLE = TensorLayout.whole("model/w", (32, 24))


def copies() -> list[Copy]:
    rows = {rank: {"s": WHOLE.slice(0, 8 * rank, 8 * rank + 8)} for rank in range(N)}
    columns = {rank: {"t": WHOLE.slice(1, 6 * rank, 6 * rank + 6)} for rank in range(N)}
    return plan(rows, columns)


def own(rank: int, dtype: torch.dtype, ranks: range) -> Own:
    """The part of a rank in all copies."""
    outgoing: dict[int, list[Wire]] = defaultdict(list)
    incoming: dict[int, list[Wire]] = defaultdict(list)
    for copy in copies():
        ends = ranks[copy.source.rank], ranks[copy.target.rank]
        if ends[0] == rank != ends[1]:
            outgoing[ends[1]].append(Wire(copy, dtype))
        if ends[1] == rank != ends[0]:
            incoming[ends[0]].append(Wire(copy, dtype))
    return Own(local=(), outgoing=outgoing, incoming=incoming)


def schedules(
    max_bytes: int, dtype: torch.dtype = torch.float32, ranks: range = range(N)
) -> list[Schedule]:
    parts = {rank: own(rank, dtype, ranks) for rank in ranks}
    pairs = Pairs([encode_loads(part, ranks, max_bytes) for part in parts.values()])
    return [schedule(part, pairs, ranks, rank, max_bytes) for rank, part in parts.items()]


@pytest.mark.parametrize("max_bytes", [1, 60, 192, 200, 1 << 20])
def test_bounded_and_complete(max_bytes: int) -> None:
    by_rank = schedules(max_bytes)
    assert len({len(of_rank.rounds) for of_rank in by_rank}) == 1
    sent: Counter[tuple[int, int]] = Counter()
    for rank, of_rank in enumerate(by_rank):
        for number, batch in enumerate(of_rank.rounds):
            for by_peer in (batch.outgoing, batch.incoming):
                pieces = [piece for of_peer in by_peer.values() for piece in of_peer]
                staged = sum(piece.num_bytes for piece in pieces)
                assert staged <= max_bytes or len(pieces) == 1
                assert staged <= max(max_bytes, 4)
            for peer, pieces in batch.outgoing.items():
                assert list(by_rank[peer].rounds[number].incoming[rank]) == list(pieces)
                for piece in pieces:
                    for i in range(piece.copy.numel):
                        offset = piece.copy.source.offset
                        inner, step = piece.copy.shape[1], piece.copy.source.strides[0]
                        sent[rank, offset + i // inner * step + i % inner] += 1
    assert set(sent.values()) == {1}
    assert len(sent) == 32 * 24 * (N - 1) / N


def test_ranks_exchange_at_the_same_time() -> None:
    """As many rounds as the busiest rank needs, not as all ranks together."""
    total = 8 * 6 * 3 * 4
    assert len(schedules(total)[0].rounds) == 1
    assert len(schedules(total // 3)[0].rounds) <= 5


def test_ranks_are_those_of_the_group() -> None:
    for of_rank, same in zip(schedules(200), schedules(200, ranks=range(3, 11, 2)), strict=True):
        for batch, other in zip(of_rank.rounds, same.rounds, strict=True):
            assert {3 + 2 * peer: len(p) for peer, p in batch.outgoing.items()} == {
                peer: len(p) for peer, p in other.outgoing.items()
            }


def test_nothing_to_move_takes_no_round() -> None:
    nobody = Own(local=(), outgoing={}, incoming={})
    pairs = Pairs([encode_loads(nobody, [0, 1], 10)] * 2)
    assert schedule(nobody, pairs, [0, 1], 1, 10).rounds == []


def test_parts_of_a_copy() -> None:
    (copy,) = plan({0: {"s": WHOLE}}, {1: {"t": WHOLE.transposed(0, 1)}})
    parts = list(cut(copy, 100))
    assert sum(part.numel for part in parts) == copy.numel
    assert max(part.numel for part in parts) <= 100
    source, target = torch.arange(32 * 24), torch.zeros(24 * 32, dtype=torch.int64)
    for part in parts:
        target.as_strided(part.shape, part.target.strides, part.target.offset).copy_(
            source.as_strided(part.shape, part.source.strides, part.source.offset)
        )
    assert torch.equal(target.view(24, 32), source.view(32, 24).T)
    seen: dict[int, int] = defaultdict(int)
    for part in parts:
        seen[part.source.offset] += 1
    assert set(seen.values()) == {1}
