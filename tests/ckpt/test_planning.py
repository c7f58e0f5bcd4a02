"""Who writes what: one writer for each chunk, balanced, near the data, within the memory bound."""

from collections import Counter

import pytest
import torch

from mcore_ckpt.planning import WritePlan, describe, layouts_of, plan_save
from mcore_parallel.layout import LayoutTensor, TensorLayout

Rank = dict[str, TensorLayout]


def planned(
    ranks: list[Rank], *, chunk_bytes: int = 64, exchange_bytes: int = 1 << 20
) -> WritePlan:
    described = [
        describe({key: LayoutTensor(torch.empty(x.shape), x) for key, x in held.items()})
        for held in ranks
    ]
    return plan_save(
        described,
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
