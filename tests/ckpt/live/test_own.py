"""What each rank finds for itself fits what the others find, and fills every target once."""

import base64
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from mcore_ckpt.alike import digest_of, split
from mcore_ckpt.live.own import Kind, Own, Side, own_copies
from mcore_ckpt.live.rounds import Pairs, encode_loads, schedule
from mcore_ckpt.planning import describe
from mcore_parallel.layout import Copy, LayoutTensor, TensorLayout

Layouts = Mapping[str, TensorLayout]


def described(layouts: Layouts) -> dict[str, Any]:
    tensors = {key: LayoutTensor(torch.empty(x.shape), x) for key, x in layouts.items()}
    return split(describe(tensors))[0]


def kinds_of(
    sources: Mapping[int, Layouts], targets: Mapping[int, Layouts], ranks: Sequence[int]
) -> list[Kind]:
    """As the ranks of a group find them together."""
    sides: dict[str, Side] = {}
    members: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank in ranks:
        ends = [described(x.get(rank, {})) for x in (sources, targets)]
        digests = [digest_of(end) for end in ends]
        for digest, end in zip(digests, ends, strict=True):
            sides.setdefault(digest, Side(end))
        members[digests[0], digests[1]].append(rank)
    return [
        Kind(ranks=tuple(some), sources=sides[a], targets=sides[b])
        for (a, b), some in members.items()
    ]


def every_part(kinds: Sequence[Kind], ranks: Sequence[int]) -> dict[int, Own]:
    """Every rank's part, once both ends of each pair have been seen to agree on it."""
    parts = {rank: own_copies(kinds, rank) for rank in ranks}
    for rank, own in parts.items():
        for other, wires in own.outgoing.items():
            assert other != rank
            assert list(parts[other].incoming[rank]) == list(wires)
        for other in own.incoming:
            assert rank in parts[other].outgoing
    return parts


def numbered(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Numbers that no two elements of two tensors share."""
    size = torch.Size(shape).numel()
    return torch.arange(size).view(*shape) + 1 + 10_000 * int(name.rpartition("t")[2])


def storage(layout: TensorLayout, *, filled: bool) -> torch.Tensor:
    local = torch.zeros(layout.shape, dtype=torch.int64)
    for fragment, view in layout.views(local) if filled else ():
        view.copy_(numbered(fragment.name, fragment.global_shape)[fragment.box.slices])
    return local


def carry_out(
    copies: Iterator[Copy], sources: Mapping[int, Layouts], targets: Mapping[int, Layouts]
) -> None:
    """Check that the copies put every element of the targets where it belongs, once."""
    given = {(r, k): storage(v, filled=True) for r, x in sources.items() for k, v in x.items()}
    taken = {(r, k): storage(v, filled=False) for r, x in targets.items() for k, v in x.items()}
    for copy in copies:
        ends = []
        for place, tensors in ((copy.source, given), (copy.target, taken)):
            local = tensors[place.rank, place.key].view(-1)
            ends.append(local.as_strided(copy.shape, place.strides, place.offset))
        ends[1].add_(ends[0])  # twice would be seen
    for (rank, key), local in taken.items():
        assert torch.equal(local, storage(targets[rank][key], filled=True)), (rank, key)


SHAPES = {"model/t1": (12, 8), "model/t2": (6, 10), "model/t3": (7,), "model/t4": (4, 6, 4)}


def held_by(rng: random.Random, ranks: Sequence[int]) -> dict[int, Layouts]:
    """Tensors over some ranks: cut, flat, or whole, and the same again on others."""
    wholes = {name: TensorLayout.whole(name, shape) for name, shape in SHAPES.items()}
    copies = rng.choice([n for n in (1, 2, 4) if len(ranks) % n == 0])
    size = len(ranks) // copies
    how, along = rng.choice(["flat", "cut", "whole"]), rng.randrange(2)
    found: dict[int, Layouts] = {}
    for place, rank in enumerate(ranks):
        at = place % size
        if how == "flat":
            bucket = TensorLayout.concat([w.reshaped((w.numel,)) for w in wholes.values()])
            step = -(-bucket.numel // size)
            ends = min(at * step, bucket.numel), min((at + 1) * step, bucket.numel)
            found[rank] = {"flat": bucket.flat_range(*ends)}
        elif how == "whole":
            some = sorted(wholes)[at % 2 :: 2] if size > 1 else sorted(wholes)
            found[rank] = {name: wholes[name] for name in some}
        else:
            parts = {}
            for name, whole in wholes.items():
                dim = min(along, len(whole.shape) - 1)
                step = -(-whole.shape[dim] // size)
                begin, end = (min(n * step, whole.shape[dim]) for n in (at, at + 1))
                parts[name] = whole.slice(dim, begin, end)
            found[rank] = parts
    return found


@pytest.mark.parametrize("seed", range(20))
def test_every_element_arrives_once_whatever_the_layouts(seed: int) -> None:
    rng = random.Random(seed)
    ranks = list(range(rng.choice([2, 4, 8])))
    share = rng.choice(["same", "others", "some"])
    half = len(ranks) // 2
    give, take = {
        "same": (ranks, ranks),
        "others": (ranks[:half], ranks[half:]),
        "some": (ranks, ranks[half:]),
    }[share]
    sources, targets = held_by(rng, give), held_by(rng, take)
    kinds = kinds_of(sources, targets, ranks)
    parts = every_part(kinds, ranks)
    copies = (
        copy
        for own in parts.values()
        for copy in [*own.local, *(w.copy for wires in own.incoming.values() for w in wires)]
    )
    carry_out(copies, sources, targets)
    limit = rng.choice([4, 100, 1000])
    pairs = Pairs([encode_loads(parts[rank], ranks, limit) for rank in ranks])
    plans = {rank: schedule(parts[rank], pairs, ranks, rank, limit) for rank in ranks}
    moved = (
        piece.copy
        for plan in plans.values()
        for batch in plan.rounds
        for pieces in batch.incoming.values()
        for piece in pieces
    )
    carry_out(iter([*(c for own in parts.values() for c in own.local), *moved]), sources, targets)


def test_what_a_rank_holds_itself_it_takes_from_there() -> None:
    whole = TensorLayout.whole("model/t1", (12, 8))
    sources = {rank: {"x": whole.slice(0, 6 * (rank % 2), 6 * (rank % 2) + 6)} for rank in range(8)}
    targets = {rank: {"y": whole.slice(0, 3, 9)} for rank in range(8)}
    for rank, own in every_part(kinds_of(sources, targets, range(8)), range(8)).items():
        assert [copy.numel for copy in own.local] == [24]
        assert sum(w.copy.numel for wires in own.incoming.values() for w in wires) == 24, rank


@pytest.mark.parametrize(("givers", "takers"), [(8, 2), (8, 8), (2, 8), (6, 4), (3, 7)])
def test_the_load_is_shared_out(givers: int, takers: int) -> None:
    """Tensors of one shape are given by those that hold them in turn."""
    tensors = {
        f"model/t{i}": TensorLayout.whole(f"model/t{i}", (4 * (1 + i // 24),)) for i in range(48)
    }
    ranks = range(givers + takers)
    sources = dict.fromkeys(ranks[:givers], tensors)
    targets = dict.fromkeys(ranks[givers:], tensors)
    parts = every_part(kinds_of(sources, targets, ranks), ranks)
    sent = [
        sum(w.copy.numel for wires in parts[rank].outgoing.values() for w in wires)
        for rank in ranks[:givers]
    ]
    assert sum(sent) == takers * sum(layout.numel for layout in tensors.values())
    assert max(sent) <= 1.25 * sum(sent) / givers


@cache
def cluster(num_ranks: int, num_tensors: int) -> tuple[list[Kind], int]:
    """A trainer of tp 8 and pp 8, its ranks being engines of tp 4 besides."""
    rows, columns = (8192, 4096), (4096, 8192)

    def tensors(tp: int, at: int, some: range) -> dict[str, TensorLayout]:
        found = {}
        for i in some:
            whole = TensorLayout.whole(f"model/t{i}", (rows, columns, (4096,))[i % 3])
            step = 8192 // tp
            cut = whole if i % 3 == 2 else whole.slice(i % 3, step * at, step * at + step)
            found[f"t{i}"] = cut
        return found

    def side(layouts: Layouts) -> Side:
        rows = {
            key: {
                "dtype": "bfloat16",
                "shape": layout.shape,
                "fragments": [
                    [f.name, f.global_shape, f.box.start, f.box.shape, f.offset, f.strides, 0, 1]
                    for f in layout.fragments
                ],
            }
            for key, layout in layouts.items()
        }
        return Side(split(rows)[0])

    stage = num_tensors // 8
    sources = {
        (tp, pp): side(tensors(8, tp, range(stage * pp, stage * pp + stage)))
        for tp in range(8)
        for pp in range(8)
    }
    targets = [side(tensors(4, tp, range(num_tensors))) for tp in range(4)]
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in range(num_ranks):
        members[rank % 8, rank // (num_ranks // 8)].append(rank)
    kinds = [
        Kind(ranks=tuple(some), sources=sources[at], targets=targets[at[0] % 4])
        for at, some in members.items()
    ]
    return kinds, stage


def test_a_rank_among_many_plans_for_itself_alone() -> None:
    """Eight times as many ranks are no more work for one of them."""
    seconds = {}
    for num_ranks in (512, 4096, 512, 4096):  # the second time is measured, all being known
        kinds, _ = cluster(num_ranks, 400)
        begun = time.process_time()
        own = own_copies(kinds, 77)
        seconds[num_ranks] = time.process_time() - begun
        received = sum(w.copy.numel for wires in own.incoming.values() for w in wires)
        received += sum(copy.numel for copy in own.local)
        assert received == sum(8192 * 1024 if i % 3 < 2 else 4096 for i in range(400))
    assert seconds[4096] < 3 * seconds[512]


@pytest.mark.skipif(not os.environ.get("NIGHTLY"), reason="10 s (NIGHTLY)")
def test_ten_thousand_tensors_and_4096_ranks() -> None:
    """What one rank does to plan, in seconds of CPU: its own copies, and everybody's rounds."""
    num_ranks, limit = 4096, 256 << 20
    kinds, _ = cluster(num_ranks, 10_000)
    begun = time.process_time()
    own = own_copies(kinds, 1777)
    row = encode_loads(own, range(num_ranks), limit)
    spent = time.process_time() - begun
    sent = np.frombuffer(base64.b64decode(row), np.int64).reshape(-1, 3)
    rows = []
    for rank in range(num_ranks):  # as if the others did the same at other distances
        moved = sent.copy()
        moved[:, 0] = (moved[:, 0] + rank - 1777) % num_ranks
        rows.append(base64.b64encode(moved.tobytes()).decode())
    begun = time.process_time()
    _, count = Pairs(rows).first_rounds(limit)
    spent += time.process_time() - begun
    assert spent < 5
    assert count < 1.5 * sent[:, 1].sum() / limit
