"""Moving tensors between live layouts: same ranks and others, dtypes, memory, checksums, errors."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from mcore_ckpt import CheckpointError
from mcore_ckpt.live import GroupTransport, LiveTransfer, PlanCache
from mcore_ckpt.live.link import _same
from mcore_ckpt.live.testing import FaultyTransport
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor, TensorLayout
from mcore_parallel.testing import RankPool

SHAPES = {
    "model/embedding.weight": (14, 6),
    "model/q": (16, 6),
    "model/k": (8, 6),
    "model/down": (6, 12),
    "model/norm": (6,),
}
CPU = torch.device("cpu")


def value(name: str, version: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * version + sum(map(ord, name)))
    return torch.randn(SHAPES[name], generator=generator)


def tensor_parallel(rank: int, size: int) -> dict[str, TensorLayout]:
    """q and k fused and cut in rows, down in columns, the vocabulary padded to 16."""
    wholes = {name: TensorLayout.whole(name, shape) for name, shape in SHAPES.items()}
    parts = [
        wholes[f"model/{p}"].slice(0, n // size * rank, n // size * (rank + 1))
        for p, n in (("q", 16), ("k", 8))
    ]
    padding = TensorLayout.padding((2, 6))
    embedding = TensorLayout.concat([wholes["model/embedding.weight"], padding])
    rows = 16 // size
    return {
        "qk": TensorLayout.concat(parts),
        "embedding": embedding.slice(0, rows * rank, rows * rank + rows),
        "down": wholes["model/down"].slice(1, 12 // size * rank, 12 // size * (rank + 1)),
        "norm": wholes["model/norm"].replicated(rank, size),
    }


def flat(rank: int, size: int) -> dict[str, TensorLayout]:
    """All tensors one after the other, cut without regard to their borders."""
    wholes = [TensorLayout.whole(name, shape) for name, shape in SHAPES.items()]
    bucket = TensorLayout.concat([whole.reshaped((whole.numel,)) for whole in wholes])
    step = -(-bucket.numel // size)
    ends = min(rank * step, bucket.numel), min((rank + 1) * step, bucket.numel)
    return {"shard": bucket.flat_range(*ends)}


def held(
    layouts: dict[str, TensorLayout], dtype: torch.dtype, version: int | None
) -> dict[str, LayoutTensor]:
    """Local tensors with the values of a version; None: rubbish that must be overwritten."""
    tensors = {}
    for key, layout in layouts.items():
        local = torch.full(layout.shape, 7.0, dtype=dtype)
        if version is not None:
            for fragment, view in layout.views(local):
                view.copy_(value(fragment.name, version)[fragment.box.slices])
        tensors[key] = LayoutTensor(local, layout)
    return tensors


def check(tensors: dict[str, LayoutTensor], version: int, through: torch.dtype) -> None:
    for key, x in tensors.items():
        expected = torch.full(x.layout.shape, 7.0, dtype=x.tensor.dtype)  # padding is left alone
        for fragment, view in x.layout.views(expected):
            view.copy_(value(fragment.name, version).to(through)[fragment.box.slices])
        assert torch.equal(x.tensor, expected), key


def move(
    give: Sequence[int], take: Sequence[int], source: torch.dtype, target: torch.dtype
) -> tuple[int, int]:
    """From flat shards on some ranks into tensor-parallel parts on others, twice."""
    group = Group.world()
    sources, targets = {}, {}
    if group.rank in give:
        sources = held(flat(give.index(group.rank), len(give)), source, 1)
    if group.rank in take:
        targets = held(tensor_parallel(take.index(group.rank), len(take)), target, None)
    link = LiveTransfer(sources, targets, group, max_bytes=200)
    moved = link(verify=True)
    check(targets, 1, source)
    for key, new in held({k: x.layout for k, x in sources.items()}, source, 2).items():
        sources[key].tensor.copy_(new.tensor)
    assert link() == moved
    check(targets, 2, source)
    link.close()
    return moved.sent_bytes, moved.received_bytes


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("give", "take", "source", "target"),
    [
        ([0, 1, 2], [0, 1], F32, F32),
        ([0, 1], [2, 3], F32, BF16),
        ([0, 1, 2, 3], [2], BF16, F32),
        ([3], [0, 1, 2, 3], F16, BF16),
    ],
)
def test_same_ranks_and_others(
    ranks: RankPool,
    give: list[int],
    take: list[int],
    source: torch.dtype,
    target: torch.dtype,
) -> None:
    """Collocated, disjoint and overlapping; dtypes that widen, narrow, or do neither."""
    moved = ranks.run(move, 4, give, take, source, target)
    assert sum(sent for sent, _ in moved) == sum(received for _, received in moved)
    for rank, (sent, received) in enumerate(moved):
        assert not sent or rank in give
        assert not received or rank in take
    if not set(give) & set(take):
        size = min(source.itemsize, target.itemsize)
        once = sum(torch.Size(shape).numel() for shape in SHAPES.values())
        copies_of_norm = SHAPES["model/norm"][0] * (len(take) - 1)
        assert sum(sent for sent, _ in moved) == size * (once + copies_of_norm)


def test_without_processes_nothing_crosses() -> None:
    group = Group.single()
    targets = held(tensor_parallel(0, 1), BF16, None)
    moved = LiveTransfer(held(flat(0, 1), F32, 3), targets, group)(verify=True)
    check(targets, 3, F32)
    assert (moved.sent_bytes, moved.num_rounds) == (0, 0)


class Measuring(GroupTransport):
    """Remembers the largest buffer of each direction."""

    largest = 0

    def exchange(self, outgoing, send_sizes, receive_sizes):  # type: ignore[no-untyped-def]
        self.largest = max(self.largest, sum(send_sizes), sum(receive_sizes))
        return super().exchange(outgoing, send_sizes, receive_sizes)


def staged(max_bytes: int) -> int:
    """One tensor of 256 KiB to every rank from the first."""
    group = Group.world()
    whole = TensorLayout.whole("model/big", (256, 256))
    big = torch.arange(65536.0).view(256, 256)
    sources = {"a": LayoutTensor(big, whole)} if group.rank == 0 else {}
    target = LayoutTensor(torch.zeros(256, 256), whole.replicated(group.rank, group.size))
    transport = Measuring(group, CPU)
    LiveTransfer(sources, {"b": target}, group, transport=transport, max_bytes=max_bytes)()
    assert torch.equal(target.tensor, big)
    return transport.largest


def test_memory_is_bounded_however_large_a_tensor_is(ranks: RankPool) -> None:
    for largest in ranks.run(staged, 3, 10_000):
        assert 4_000 < largest <= 10_000 + 3 * 16  # a part of the buffer begins at 16 bytes
    assert max(ranks.run(staged, 3, 1 << 20)) >= 1 << 18


def cached() -> tuple[int, int]:
    group = Group.world()
    plans = PlanCache(limit=2)
    for size in (2, 2, 1, 2):
        layouts = tensor_parallel(group.rank % size, size)
        targets = held(layouts, F32, None)
        sources = held(flat(group.rank, group.size), F32, 4)
        LiveTransfer(sources, targets, group, plans=plans)()
        check(targets, 4, F32)
    own = PlanCache() if group.rank else plans  # the others know nothing of it: planned again
    targets = held(tensor_parallel(group.rank, 2), F32, None)
    LiveTransfer(held(flat(group.rank, group.size), F32, 5), targets, group, plans=own)()
    check(targets, 5, F32)
    return plans.hits, own.hits


def test_plans_are_kept(ranks: RankPool) -> None:
    assert ranks.run(cached, 2) == [(2, 2), (2, 0)]


def test_the_oldest_plan_is_dropped() -> None:
    plans = PlanCache(limit=1)
    group = Group.single()
    for dtype in (F32, BF16, F32):
        LiveTransfer(held(flat(0, 1), F32, 1), held(flat(0, 1), dtype, None), group, plans=plans)
    assert plans.hits == 0
    with pytest.raises(ValueError, match="limit is 0; nearest valid: 1"):
        PlanCache(limit=0)


def faults(byte: int) -> tuple[str, bool]:
    """A bit that flips on its way to rank 1, with and without verification."""
    group = Group.world()
    sources = held(flat(group.rank, group.size), F32, 1)
    targets = held(tensor_parallel(group.rank, group.size), F32, None)
    inner = GroupTransport(group, CPU)
    transport = FaultyTransport(inner, on=group.rank == 1, byte=byte)
    link = LiveTransfer(sources, targets, group, transport=transport)
    error = error_of(lambda: link(verify=True))
    link(verify=True)
    check(targets, 1, F32)
    link = LiveTransfer(
        sources, targets, group, transport=FaultyTransport(inner, on=group.rank == 1)
    )
    link()
    return error, error_of(partial(check, targets, 1, F32)) == ""


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, CheckpointError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_flipped_bit_is_found_where_it_is_asked_for(ranks: RankPool) -> None:
    (error, whole), (other, damaged) = ranks.run(faults, 2, 5)
    for text in (error, other):
        assert text.startswith("CheckpointError: moving tensors failed: rank 1 of 2: model/")
        assert "from rank 0 to rank 1 did not arrive as it was sent" in text
    assert whole
    assert not damaged, "unverified, the flip reaches the target: the fault is a real one"


def misfits() -> list[str]:
    group = Group.world()
    sources = held(flat(group.rank, group.size), F32, 1)
    good = held(tensor_parallel(group.rank, group.size), F32, None)
    odd = group.rank == 1
    other = TensorLayout.whole("model/new", (2,))
    taller = TensorLayout.whole("model/norm", (7,))
    turned = LayoutTensor(torch.zeros(2, 3).T, TensorLayout.whole("model/q", (3, 2)))
    norm = TensorLayout.whole("model/norm", (6,))
    bad: list[dict[str, LayoutTensor]] = [
        {"x": LayoutTensor(torch.zeros(2), other)} if odd else {},
        {"x": LayoutTensor(torch.zeros(7), taller)} if odd else {},
        {"x": turned} if odd else {},
        {"x": LayoutTensor(torch.zeros(6, dtype=torch.int32), norm)} if odd else {},
    ]
    errors = [error_of(partial(LiveTransfer, sources, good | more, group)) for more in bad]
    bounds = {"max_bytes": 100 + group.rank}
    errors.append(error_of(partial(LiveTransfer, sources, good, group, **bounds)))
    link = LiveTransfer(sources, good, group)
    errors.append(error_of(partial(link, verify=odd)))
    return errors


def test_what_does_not_fit_is_refused_on_all_ranks(ranks: RankPool) -> None:
    expected = [
        "model/new: no source holds this tensor",
        "model/norm: global shapes [6] and [7] differ",
        "x: cannot move a tensor that is not contiguous",
        "model/norm: torch.float32 does not convert to torch.int32",
        "max_bytes differs between ranks: [100, 101]",
        "verify is set on ranks [1] alone",
    ]
    for errors in ranks.run(misfits, 2):
        for error, part in zip(errors, expected, strict=True):
            assert error.startswith("ValueError"), error
            assert part in error, error


def test_a_nan_through_another_dtype_is_a_nan_whatever_its_bits() -> None:
    """A signalling one is made a quiet one by some conversions and not by others."""
    source = torch.tensor([0x7D01, 0x3C00], dtype=torch.int16).view(torch.float16)
    target = torch.tensor([torch.nan, 1.0])
    target.view(torch.int32)[0] ^= 1
    assert _same(target, source)
    target[1] = 2.0
    assert not _same(target, source)
    other = source.clone()
    other.view(torch.int16)[0] ^= 2
    assert not _same(other, source)  # in the same dtype every bit counts
