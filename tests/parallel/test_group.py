import copy
import pickle

import pytest
import torch
import torch.distributed as dist

from mcore_parallel import Group, all_gather, all_gather_object, all_reduce
from mcore_parallel.testing import RankPool


def test_single_group_needs_nothing() -> None:
    group = Group.single(5, "tp")
    assert (group.rank, group.size, group.ranks, group.name) == (0, 1, (5,), "tp")
    assert group.cpu is group
    assert group.split(1) is group
    group.close()
    assert not dist.is_initialized()
    assert Group.world().size == 1
    assert Group.create([3]).ranks == (3,)


def test_arithmetic_group_knows_its_parts() -> None:
    group = Group(5, 8, tuple(range(0, 16, 2)), None, "dp")
    part = group.split(4)
    assert (part.rank, part.size, part.ranks) == (1, 4, (8, 10, 12, 14))
    assert group.split(1).ranks == (10,)
    assert group.cpu is group
    assert pickle.loads(pickle.dumps(group)).ranks == group.ranks
    assert copy.deepcopy(group) is group
    assert copy.copy(group) is group


def test_wrong_groups_are_rejected() -> None:
    group = Group(0, 6, tuple(range(6)), None, "dp")
    for size in (0, 4, 12):
        with pytest.raises(ValueError, match=rf"6 ranks .* parts of {size}: .* 1, 2, 3, 6"):
            group.split(size)
    with pytest.raises(ValueError, match="rank 2 of size 2 does not fit 2 ranks"):
        Group(2, 2, (0, 1))
    with pytest.raises(ValueError, match=r"'tp' of 2 ranks needs torch.distributed"):
        Group.create([0, 1], name="tp")


def members_only() -> tuple[list[int], list[int]]:
    """Ranks hold different numbers of groups when they meet in a new one."""
    me = torch.tensor([dist.get_rank()])
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match=r"rank 0 is not one of its ranks \[1, 2\]"):
            Group.create([1, 2])
    else:
        extra = Group.create([2, 1], name="extra")
        assert all_gather(me, extra).tolist() == [2, 1]
    group = Group.create([2, 0, 1], name="all")
    seen = all_gather(me, group).tolist()
    parts = group.split(1).ranks[0], group.rank
    assert parts == (dist.get_rank(), [2, 0, 1].index(dist.get_rank()))
    world = Group.world()
    with pytest.raises(ValueError, match=r"ranks \[7\] are not in a world of 3"):
        Group.create([0, 7])
    with pytest.raises(ValueError, match=r"\[1, 1\] name a rank twice"):
        Group.create([1, 1])
    return seen, all_gather(me, world).tolist()


def test_groups_are_made_by_their_members_alone_in_any_order(ranks: RankPool) -> None:
    assert ranks.run(members_only, 3) == [([2, 0, 1], [0, 1, 2])] * 3


def split_and_close() -> list[int]:
    sums = []
    for _ in range(3):  # the same ranks again, after the old groups have been destroyed
        group = Group.create(range(4), name="g")
        half = group.split(2)
        assert group.split(2) is half
        assert group.split(4) is group
        assert half.ranks == ((0, 1), (2, 3))[dist.get_rank() // 2]
        sums.append(int(all_reduce(torch.tensor(dist.get_rank()), half)))
        group.close()
        group.close()
        with pytest.raises(ValueError, match=r"'g/2' of ranks .* has been closed"):
            all_reduce(torch.tensor(1), half)
        with pytest.raises(ValueError, match=r"'g' of ranks \[0, 1, 2, 3\] has been closed"):
            group.split(2)
    world = Group.world()
    world.close()  # not ours: stays
    sums.append(int(all_reduce(torch.tensor(1), world)))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(world)
    return sums


def test_parts_are_kept_destroyed_with_their_group_and_made_again(ranks: RankPool) -> None:
    assert ranks.run(split_and_close, 4) == [[1, 1, 1, 4], [1, 1, 1, 4], [5, 5, 5, 4], [5, 5, 5, 4]]


def twin(device: str) -> list[list[int]]:
    group = Group.create(range(dist.get_world_size()), name="dp", backend="nccl")
    twin = group.cpu
    assert twin is not group
    assert twin is group.cpu
    assert twin.cpu is twin
    assert dist.get_backend(twin.process_group) == "gloo"
    found = [
        all_gather_object(group.rank, group),
        all_gather(torch.tensor([group.rank]), twin).tolist(),
        all_gather(torch.tensor([group.rank], device=device), group).tolist(),
        [int(all_reduce(torch.tensor(1, device=device), group.split(1)))],
    ]
    group.close()
    return found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_gpu_group_has_a_gloo_twin(ranks: RankPool) -> None:
    expected = [[0, 1], [0, 1], [0, 1], [1]]
    assert ranks.run(twin, 2, "cuda", device="cuda") == [expected] * 2
