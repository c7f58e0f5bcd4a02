from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mcore_parallel.group import Group
from mcore_parallel.layout import (
    Box,
    LayoutTensor,
    TensorLayout,
    gather_all,
    gather_global,
    plan,
    reshard,
    transfer,
)
from mcore_parallel.testing import RankPool

SHAPES = {"q": (8, 6), "k": (4, 6), "table": (7, 3), "norm": (6,), "scale": ()}


def value(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = SHAPES[name]
    index = torch.arange(max(1, Box.whole(shape).numel)).view(shape)
    return (index * 0.37 + list(SHAPES).index(name)).to(dtype)


def tensor_parallel(rank: int, size: int) -> dict[str, TensorLayout]:
    """Fused q/k, an uneven padded table, replicated norm and scale."""
    q = TensorLayout.box("q", (8, 6), Box((8 // size * rank, 0), (8 // size, 6)))
    k = TensorLayout.box("k", (4, 6), Box((4 // size * rank, 0), (4 // size, 6)))
    step = -(-7 // size)
    a, b = min(7, step * rank), min(7, step * (rank + 1))
    rows = TensorLayout.box("table", (7, 3), Box((a, 0), (b - a, 3)))
    return {
        "qk": TensorLayout.concat([q, k]),
        "table": TensorLayout.concat([rows, TensorLayout.padding((step - (b - a), 3))]),
        "norm": TensorLayout.whole("norm", (6,)).replicated(rank, size),
        "scale": TensorLayout.whole("scale", ()).replicated(rank, size),
    }


def flat_shards(rank: int, size: int) -> dict[str, TensorLayout]:
    """Everything on one tensor rank, cut into flat ranges of one element difference."""
    result = {}
    for key, layout in tensor_parallel(0, 1).items():
        cuts = [layout.numel * i // size for i in range(size + 1)]
        result[f"flat/{key}"] = layout.flat_range(cuts[rank], cuts[rank + 1])
    return result


def filled(
    layouts: dict[str, TensorLayout], dtype: torch.dtype, device: str = "cpu"
) -> dict[str, LayoutTensor]:
    result = {}
    for key, layout in layouts.items():
        local = torch.zeros(layout.shape, dtype=dtype, device=device)
        for f, view in layout.views(local):
            view.copy_(value(f.name, dtype)[f.box.slices])
        result[key] = LayoutTensor(local, layout)
    return result


def empty(
    layouts: dict[str, TensorLayout], dtype: torch.dtype, device: str = "cpu"
) -> dict[str, LayoutTensor]:
    return {
        key: LayoutTensor(torch.zeros(x.shape, dtype=dtype, device=device), x)
        for key, x in layouts.items()
    }


def check(found: dict[str, LayoutTensor], expected: dict[str, LayoutTensor]) -> None:
    for key, tensor in expected.items():
        assert torch.equal(found[key].tensor, tensor.tensor), key


def there_and_back(source: torch.dtype, target: torch.dtype, device: str = "cpu") -> None:
    group = Group.world()
    sharded = filled(tensor_parallel(group.rank, group.size), source, device)
    flat = empty(flat_shards(group.rank, group.size), target, device)
    reshard(sharded, flat, group)
    expected = filled(flat_shards(group.rank, group.size), source, device)
    check(flat, {k: LayoutTensor(x.tensor.to(target), x.layout) for k, x in expected.items()})
    back = empty(tensor_parallel(group.rank, group.size), target, device)
    reshard(flat, back, group)
    check(back, {k: LayoutTensor(x.tensor.to(target), x.layout) for k, x in sharded.items()})


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tensors_go_from_one_layout_to_another_and_back(ranks: RankPool, size: int) -> None:
    ranks.run(there_and_back, size, torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float8_e4m3fn),
        (torch.float16, torch.bfloat16),
        (torch.int64, torch.int32),
    ],
)
def test_dtypes_are_converted_once(
    ranks: RankPool, source: torch.dtype, target: torch.dtype
) -> None:
    ranks.run(there_and_back, 2, source, target)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_gpus_go_over_nccl_and_through_the_cpu_over_gloo(ranks: RankPool) -> None:
    size = min(4, torch.cuda.device_count() // 2 * 2) or 1
    ranks.run(there_and_back, size, torch.float32, torch.bfloat16, "cuda", device="cuda")
    ranks.run(there_and_back, 2, torch.float32, torch.bfloat16, "cuda:0")


def mixed_dtypes_in_small_rounds(max_bytes: int) -> int:
    """Tensors of several item sizes share buffers; returns how many exchanges it took."""
    group = Group.world()
    kinds = [torch.uint8, torch.float64, torch.bfloat16, torch.bool, torch.complex128]
    mine, other = {}, {}
    sources: dict[int, dict[str, TensorLayout]] = {rank: {} for rank in group.ranks}
    targets: dict[int, dict[str, TensorLayout]] = {rank: {} for rank in group.ranks}
    for i, dtype in enumerate(kinds):
        whole = TensorLayout.whole(f"w{i}", (5, 3))
        content = (torch.arange(15).view(5, 3) % (2 if dtype is torch.bool else 100)).to(dtype)
        for rank in group.ranks:
            cuts = [5 * rank // group.size, 5 * (rank + 1) // group.size]
            sources[rank][f"w{i}"] = whole.slice(0, *cuts)
            targets[rank][f"w{i}"] = whole.transposed().replicated(rank, group.size)
        a, b = 5 * group.rank // group.size, 5 * (group.rank + 1) // group.size
        mine[f"w{i}"] = content[a:b].contiguous()
        other[f"w{i}"] = torch.zeros(3, 5, dtype=dtype)
    calls = 0
    original = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", counted):
        transfer(plan(sources, targets), mine, other, group, max_bytes=max_bytes)
    for i, dtype in enumerate(kinds):
        content = (torch.arange(15).view(5, 3) % (2 if dtype is torch.bool else 100)).to(dtype)
        assert torch.equal(other[f"w{i}"], content.t()), dtype
    return calls


@pytest.mark.parametrize("size", [2, 3])
def test_dtypes_share_a_buffer_and_rounds_bound_its_size(ranks: RankPool, size: int) -> None:
    assert ranks.run(mixed_dtypes_in_small_rounds, size, 1 << 20) == [1] * size
    few, *others = ranks.run(mixed_dtypes_in_small_rounds, size, 100)
    assert few > 1
    assert others == [few] * (size - 1)


def bytes_sent(source: torch.dtype, target: torch.dtype) -> int:
    """Rank 0 gives rank 1 a tensor of 64 elements; returns the bytes that leave this rank."""
    group = Group.world()
    whole = TensorLayout.whole("w", (8, 8))
    sent = 0
    original = dist.all_to_all_single

    def counted(out: Any, buffer: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += buffer.numel() * buffer.itemsize
        return original(out, buffer, *args, **kwargs)

    copies = plan({0: {"a": whole}}, {1: {"b": whole}})
    sources = {"a": torch.ones(8, 8, dtype=source)}
    with mock.patch.object(dist, "all_to_all_single", counted):
        transfer(copies, sources, {"b": torch.zeros(8, 8, dtype=target)}, group)
    return sent


def test_elements_travel_in_the_smaller_dtype(ranks: RankPool) -> None:
    assert ranks.run(bytes_sent, 2, torch.float32, torch.bfloat16) == [128, 0]
    assert ranks.run(bytes_sent, 2, torch.bfloat16, torch.float32) == [128, 0]
    assert ranks.run(bytes_sent, 2, torch.float8_e4m3fn, torch.float64) == [64, 0]


def gathered() -> dict[str, torch.Tensor]:
    group = Group.world()
    tensors = filled(tensor_parallel(group.rank, group.size), torch.bfloat16)
    tensors |= {} if group.rank else {"only here": filled_extra()}
    return gather_all(tensors, group)


def filled_extra() -> LayoutTensor:
    return LayoutTensor(torch.arange(6.0), TensorLayout.whole("extra", (6,)))


def test_gather_all_gives_rank_0_whole_tensors_also_of_one_rank_only(ranks: RankPool) -> None:
    first, *others = ranks.run(gathered, 2)
    assert others == [{}]
    assert sorted(first) == ["extra", "k", "norm", "q", "scale", "table"]
    for name in SHAPES:
        assert torch.equal(first[name], value(name, torch.bfloat16)), name


def gathered_of_a_part() -> dict[str, torch.Tensor] | None:
    """Ranks 3 and 1, in this order, form the group; the others take no part."""
    if dist.get_rank() not in (3, 1):
        return None
    group = Group.create((3, 1), name="part")
    layout = TensorLayout.whole("q", SHAPES["q"]).slice(0, *[(0, 3), (3, 8)][group.rank])
    local = value("q")[layout.fragments[0].box.slices].contiguous()
    result = gather_global(local, layout, group)
    group.close()
    return result


def test_plans_name_ranks_of_the_world_whatever_the_group(ranks: RankPool) -> None:
    results = ranks.run(gathered_of_a_part, 4)
    assert results[0] is results[2] is None
    assert results[1] == {}
    assert torch.equal(results[3]["q"], value("q"))


def one_rank_lacks_a_tensor() -> str:
    group = Group.world()
    layouts = {rank: tensor_parallel(rank, group.size) for rank in group.ranks}
    flat = {rank: flat_shards(rank, group.size) for rank in group.ranks}
    sources = {k: x.tensor for k, x in filled(layouts[group.rank], torch.float32).items()}
    targets = {k: x.tensor for k, x in empty(flat[group.rank], torch.float32).items()}
    if group.rank == 1:
        del sources["qk"]
    with pytest.raises(ValueError) as caught:
        transfer(plan(layouts, flat), sources, targets, group)
    return str(caught.value)


def test_an_error_on_one_rank_is_raised_on_all(ranks: RankPool) -> None:
    errors = ranks.run(one_rank_lacks_a_tensor, 4)
    assert len(set(errors)) == 1
    assert "rank 1, local tensor 'qk' is missing" in errors[0]


def test_a_single_process_needs_no_torch_distributed() -> None:
    group = Group.single(rank=5)
    sharded = filled(tensor_parallel(0, 1), torch.float32)
    flat = empty(flat_shards(0, 1), torch.float64)
    reshard(sharded, flat, group)
    whole = gather_all(flat, group)
    assert all(torch.equal(whole[name], value(name).double()) for name in SHAPES)


def test_tensors_that_do_not_fit_the_plan_are_refused() -> None:
    group = Group.single()
    whole = TensorLayout.whole("w", (4, 3))
    copies = plan({0: {"a": whole}}, {0: {"b": whole}})
    good = torch.zeros(4, 3)
    with pytest.raises(ValueError, match="w: rank 0, local tensor 'a' is missing"):
        transfer(copies, {}, {"b": good}, group)
    with pytest.raises(ValueError, match="local tensor 'b' is not contiguous"):
        transfer(copies, {"a": good}, {"b": torch.zeros(3, 4).t()}, group)
    with pytest.raises(ValueError, match="local tensor 'b' of 9 elements has no element 11"):
        transfer(copies, {"a": good}, {"b": torch.zeros(9)}, group)
    elsewhere = plan({0: {"a": whole}}, {3: {"b": whole}})
    with pytest.raises(ValueError, match=r"w: rank 3 is not one of \[0\]"):
        transfer(elsewhere, {"a": good}, {"b": good}, group)


def test_one_global_tensor_in_two_dtypes_is_not_gathered() -> None:
    halves = TensorLayout.whole("w", (4,)).flat_range(0, 2), TensorLayout.whole("w", (4,))
    tensors = {
        "a": LayoutTensor(torch.zeros(2), halves[0]),
        "b": LayoutTensor(torch.zeros(2).double(), halves[1].flat_range(2, 4)),
    }
    with pytest.raises(ValueError, match=r"w: held as torch.float32 and as torch.float64"):
        gather_all(tensors, Group.single())
