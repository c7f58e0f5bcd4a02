"""Who writes what: one writer for each chunk, balanced, near the data, within the memory bound."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_ckpt.alike import alike
from mcore_ckpt.planning import WritePlan, describe, layouts_of, plan_save
from mcore_parallel.layout import Fragment, LayoutTensor, TensorLayout

Rank = dict[str, TensorLayout]


def describe_all(held: Rank) -> dict[str, Any]:
    return describe({key: LayoutTensor(torch.empty(x.shape), x) for key, x in held.items()})


def planned(
    ranks: list[Rank], *, chunk_bytes: int = 64, exchange_bytes: int = 1 << 20
) -> WritePlan:
    return plan_save(
        alike([describe_all(held) for held in ranks]),
        [10 + rank for rank in range(len(ranks))],
        chunk_bytes=chunk_bytes,
        exchange_bytes=exchange_bytes,
    )


def written(plan: WritePlan) -> Counter[int]:
    """Bytes that each rank writes."""
    count: Counter[int] = Counter()
    for batch in plan.rounds:
        for chunk in batch.chunks:
            count[chunk.writer] += plan.tensors[chunk.name].grid.box(chunk.number).numel * 4
    return count


def exchanged(plan: WritePlan) -> int:
    """Elements that cross ranks."""
    copies = [copy for batch in plan.rounds for copy in batch.copies]
    return sum(copy.numel for copy in copies if copy.source.rank != copy.target.rank)


def test_descriptions_come_back() -> None:
    whole = TensorLayout.whole("model/a", (4, 6)).transposed().replicated(1, 3)
    described = describe({"a": LayoutTensor(torch.zeros(6, 4), whole)})
    assert layouts_of(described) == {"a": whole}


def test_aligned_shards_need_no_exchange() -> None:
    whole = TensorLayout.whole("model/a", (32, 8))
    plan = planned([{"a": whole.slice(0, 8 * rank, 8 * rank + 8)} for rank in range(4)])
    assert exchanged(plan) == 0
    assert set(written(plan).values()) == {32 * 8}


def test_replicas_share_the_writing() -> None:
    whole = TensorLayout.whole("model/a", (32, 8))
    plan = planned([{"a": whole.replicated(rank, 4)} for rank in range(4)])
    assert exchanged(plan) == 0
    assert set(written(plan).values()) == {32 * 8}


def test_a_rank_that_holds_nearly_everything_gets_help() -> None:
    big, small = TensorLayout.whole("model/big", (64, 8)), TensorLayout.whole("model/s", (2, 8))
    plan = planned([{"a": big}, {"a": small}, {}])
    total = sum(written(plan).values())
    assert max(written(plan).values()) <= 0.7 * total


def test_flat_shards_move_less_than_everything() -> None:
    whole = TensorLayout.whole("model/a", (40, 8))
    shards = [{"a": whole.flat_range(80 * rank, 80 * rank + 80)} for rank in range(4)]
    plan = planned(shards)
    assert exchanged(plan) < whole.numel / 2
    assert max(written(plan).values()) <= 1.25 * whole.numel


@pytest.mark.parametrize("exchange_bytes", [1, 100, 200, 10_000])
def test_rounds_are_bounded_and_hold_every_chunk_once(exchange_bytes: int) -> None:
    ranks: list[Rank] = [
        {f"{i}": TensorLayout.whole(f"model/{i}.{rank}", (7, 5)) for i in range(3)}
        for rank in range(3)
    ]
    plan = planned(ranks, exchange_bytes=exchange_bytes)
    chunks = [(chunk.name, chunk.number) for batch in plan.rounds for chunk in batch.chunks]
    expected = [(n, i) for n, info in plan.tensors.items() for i in range(info.grid.num_chunks)]
    assert sorted(chunks) == sorted(expected)
    for batch in plan.rounds:
        keys = {chunk.key for chunk in batch.chunks}
        assert {copy.target.key for copy in batch.copies} == keys
        for rank in range(3):
            mine = batch.of(rank)
            staged = sum(plan.tensors[chunk.name].chunk_bytes for chunk in mine)
            assert len(mine) == 1 or staged <= exchange_bytes


def test_the_plan_is_the_same_on_every_rank_and_follows_the_group() -> None:
    whole = TensorLayout.whole("model/a", (9, 5))
    ranks: list[Rank] = [{"a": whole.flat_range(15 * r, 15 * r + 15)} for r in range(3)]
    assert planned(ranks) == planned(ranks)
    used = {copy.target.rank for batch in planned(ranks).rounds for copy in batch.copies}
    assert used <= {10, 11, 12}


def mixed(rank: int) -> Rank:
    """Rank of two tensor-parallel and four data-parallel ones, of which each two share experts."""
    shard, replica = rank % 2, rank // 2
    dense = TensorLayout.whole("model/dense", (32, 8)).slice(1, 4 * shard, 4 * shard + 4)
    expert = TensorLayout.whole("model/expert", (4, 8, 8)).slice(
        0, replica // 2 * 2, replica // 2 * 2 + 2
    )
    norm = TensorLayout.whole("model/norm", (8,))
    return {
        "dense": dense.replicated(replica, 4),
        "expert": expert.replicated(replica % 2 * 2 + shard, 4),
        "norm": norm.replicated(rank, 8),
    }


def test_ranks_that_hold_the_same_are_planned_as_one() -> None:
    ranks = [mixed(rank) for rank in range(8)]
    kinds = alike([describe_all(held) for held in ranks])
    assert [kind.ranks for kind in kinds] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    dense, expert, norm = (list(kinds[1].replicas_of(cut)) for cut in range(3))
    assert dense == [((0, 4), (1, 4))]
    assert expert == [((1, 4), (3, 4))]
    assert norm == [((1, 8), (3, 8))]
    plan = planned(ranks)
    total = sum(written(plan).values())
    assert set(written(plan)) == set(range(8))
    assert max(written(plan).values()) <= 1.5 * total / 8
    sent = {(copy.source.rank, copy.target.rank) for b in plan.rounds for copy in b.copies}
    assert all(source % 2 == target % 2 or source // 2 == target // 2 for source, target in sent)
    filled = sum(copy.numel for batch in plan.rounds for copy in batch.copies)
    assert filled == 32 * 8 + 4 * 8 * 8 + 8


def test_replicas_may_begin_and_end_anywhere() -> None:
    """Tensors that are cut alike are the same replicas, or each another one on the same rank."""
    a, b = (TensorLayout.whole(f"model/{name}", (4, 4)) for name in "ab")
    ranks = [{"a": a.replicated(r, 2), "b": b.replicated(r, 2)} for r in (0, 1)]
    assert len(alike([describe_all(held) for held in ranks])) == 1
    assert sum(written(planned(ranks)).values()) == 2 * 16 * 4
    crossed = [{"a": a.replicated(r, 2), "b": b.replicated(1 - r, 2)} for r in (0, 1)]
    (kind,) = alike([describe_all(held) for held in crossed])
    assert list(kind.replicas_of(0)) == [((0, 2), (1, 2))]
    assert list(kind.replicas_of(1)) == [((1, 2), (0, 2))]
    assert sum(written(planned(crossed)).values()) == 2 * 16 * 4


def test_replicas_that_are_no_replicas() -> None:
    whole = TensorLayout.whole("model/a", (4, 4))
    with pytest.raises(ValueError, match=r"model/a .* held twice in replica 0 of 2"):
        planned([{"a": whole.replicated(0, 2)}, {"a": whole.replicated(0, 2)}])
    with pytest.raises(ValueError, match=r"model/a .* missing in replica 1 of 2"):
        planned([{"a": whole.replicated(0, 2)}])
    with pytest.raises(ValueError, match="one fragment has 2 replicas, another 3"):
        planned([{"a": whole.replicated(0, 2)}, {"a": whole.replicated(1, 3)}])


def fused(rank: int) -> Rank:
    """Rank of four with shards of many tensors one after the other, and a few apart."""
    wholes = [TensorLayout.whole(f"model/{i}", (8, 6)) for i in range(5)]
    bucket = TensorLayout.concat([whole.reshaped((48,)) for whole in wholes])
    rows = [
        TensorLayout.whole(f"exp_avg/{i}", (8, 6)).slice(0, 2 * rank, 2 * rank + 2) for i in "ab"
    ]
    empty = TensorLayout.whole("model/empty", (0, 6)).replicated(rank, 4)
    return {
        "bucket": bucket.flat_range(60 * rank, 60 * rank + 60),
        "rows": TensorLayout.concat(rows),
        "empty": empty,
    }


@pytest.mark.parametrize("hold", [mixed, fused])
def test_the_copies_put_every_chunk_together(hold: Callable[[int], Rank]) -> None:
    """Of tensors that are held alike one is planned: what is copied has to be right for each."""
    held = {10 + rank: hold(rank) for rank in range(8 if hold is mixed else 4)}
    names = sorted({f.name for of in held.values() for x in of.values() for f in x.fragments})
    sources = {}
    for rank, of_rank in held.items():
        for key, layout in of_rank.items():
            sources[rank, key] = local = torch.full(layout.shape, -1.0)
            for f in layout.fragments:
                local.as_strided(f.box.shape, f.strides, f.offset).copy_(values_of(f, names))
    plan = planned(list(held.values()))
    for batch in plan.rounds:
        for chunk in batch.chunks:
            info = plan.tensors[chunk.name]
            buffer = torch.full(info.chunk_shape, -2.0)
            for copy in batch.copies:
                if copy.target.key == chunk.key:
                    assert copy.target.rank == 10 + chunk.writer
                    local, where = sources[copy.source.rank, copy.source.key], copy.source
                    part = local.as_strided(copy.shape, where.strides, where.offset)
                    target = buffer.as_strided(copy.shape, copy.target.strides, copy.target.offset)
                    target.copy_(part)
            box = info.grid.box(chunk.number)
            whole = TensorLayout.box(chunk.name, info.shape, box).fragments[0]
            assert buffer[tuple(map(slice, box.shape))].equal(values_of(whole, names))


def values_of(fragment: Fragment, names: list[str]) -> torch.Tensor:
    """Return what a box of a tensor holds: no two elements the same."""
    numel = math.prod(fragment.global_shape)
    whole = torch.arange(float(numel)).reshape(fragment.global_shape)
    where = zip(fragment.box.start, fragment.box.stop, strict=True)
    return whole[tuple(slice(a, b) for a, b in where)] + 1000 * names.index(fragment.name)
