import itertools
import math
import time
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mcore_parallel import Group, ParallelConfig, ParallelMesh, all_gather, all_reduce, barrier
from mcore_parallel.testing import RankPool

NAMES = (
    *("tp", "cp", "dp", "pp", "ep", "etp", "edp", "dp_cp", "replica", "embedding", "world"),
    *("dp_shard", "dp_copies", "edp_shard", "edp_copies"),
)


# --- arithmetic ---------------------------------------------------------------------------------


def test_single_mesh_is_alone_and_needs_nothing() -> None:
    mesh = ParallelMesh.single()
    assert all(getattr(mesh, name).size == 1 for name in NAMES)
    assert mesh.is_first_stage
    assert mesh.is_last_stage
    assert mesh.device == torch.device("cpu")
    assert ParallelMesh.single("meta").device == torch.device("meta")
    assert set(mesh.coords.values()) == {0}
    created = ParallelMesh.create(ParallelConfig())
    assert created is not None
    assert created.world.size == 1
    created.close()
    assert not dist.is_initialized()


def test_neighbours_along_each_axis() -> None:
    """The layout that the field uses: tp fastest, then cp, dp, and pp slowest."""
    mesh = ParallelMesh.arithmetic(ParallelConfig(tp=2, cp=2, pp=2), world_size=16, rank=13)
    assert mesh.coords == {"tp": 1, "cp": 0, "dp": 1, "pp": 1, "etp": 1, "ep": 0, "edp": 2}
    assert mesh.tp.ranks == (12, 13)
    assert mesh.cp.ranks == (13, 15)
    assert mesh.dp.ranks == (9, 13)
    assert mesh.pp.ranks == (5, 13)
    assert mesh.dp_cp.ranks == (9, 11, 13, 15)
    assert mesh.replica.ranks == (4, 5, 6, 7, 12, 13, 14, 15)
    assert mesh.embedding.ranks == (5, 13)
    assert mesh.edp.ranks == (9, 11, 13, 15)
    assert (mesh.is_first_stage, mesh.is_last_stage) == (False, True)


def test_expert_view_is_folded_on_its_own() -> None:
    config = ParallelConfig(tp=4, pp=2, ep=4, etp=1)
    mesh = ParallelMesh.arithmetic(config, world_size=16, rank=10)
    assert mesh.tp.ranks == (8, 9, 10, 11)
    assert mesh.ep.ranks == (8, 9, 10, 11)
    assert mesh.etp.ranks == (10,)
    assert mesh.edp.ranks == (10, 14)
    wide = ParallelMesh.arithmetic(ParallelConfig(tp=1, etp=2, ep=2), world_size=8, rank=5)
    assert (wide.etp.ranks, wide.ep.ranks, wide.edp.ranks) == ((4, 5), (5, 7), (1, 5))


def test_order_decides_which_ranks_are_neighbours() -> None:
    config = ParallelConfig(tp=2, pp=2, order="pp-dp-tp-cp-ep")
    mesh = ParallelMesh.arithmetic(config, world_size=8, rank=6)
    assert (mesh.pp.ranks, mesh.dp.ranks, mesh.tp.ranks) == ((6, 7), (4, 6), (2, 6))
    assert mesh.embedding.ranks == (6, 7)


def test_middle_stages_hold_no_embedding() -> None:
    meshes = [ParallelMesh.arithmetic(ParallelConfig(pp=3), world_size=3, rank=r) for r in range(3)]
    assert [mesh.embedding.ranks for mesh in meshes] == [(0, 2), (1,), (0, 2)]


def test_shares_are_dealt_out_among_neighbours_and_copied_over_the_rest() -> None:
    config = ParallelConfig(tp=2, cp=2, replicas=2)
    mesh = ParallelMesh.arithmetic(config, world_size=16, rank=13)
    assert mesh.dp.ranks == (1, 5, 9, 13)
    assert mesh.dp_shard.ranks == (9, 11, 13, 15)
    assert mesh.dp_copies.ranks == (5, 13)
    assert mesh.edp_shard.ranks == (9, 11, 13, 15)
    config = ParallelConfig(tp=2, ep=2, etp=1, replicas=2, order="tp-dp-ep-cp")
    mesh = ParallelMesh.arithmetic(config, world_size=8, rank=5)
    assert (mesh.edp.ranks, mesh.edp_shard.ranks, mesh.edp_copies.ranks) == (
        (4, 5, 6, 7),
        (4, 5),
        (5, 7),
    )
    whole = ParallelMesh.arithmetic(ParallelConfig(cp=2), world_size=8, rank=5)
    assert (whole.dp_shard.ranks, whole.dp_copies.ranks) == (whole.dp_cp.ranks, (5,))


VALID = st.tuples(
    *(st.sampled_from([1, 2, 3]) for _ in range(4)),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 1, 2, 4]),
    st.permutations(["tp", "cp", "ep", "dp"]),
)


@settings(max_examples=60, deadline=None)
@given(values=VALID)
def test_every_rank_sees_the_same_groups(
    values: tuple[int, int, int, int, int, int | None, list[str]],
) -> None:
    tp, cp, dp, pp, ep, etp, order = values
    assume((tp * cp * dp) % (ep * (etp or tp)) == 0)
    edp = tp * cp * dp // (ep * (etp or tp))
    config = ParallelConfig(
        tp=tp,
        cp=cp,
        dp=dp,
        pp=pp,
        ep=ep,
        etp=etp,
        order="-".join([*order, "pp"]),
        replicas=math.gcd(dp, edp),
    )
    size = tp * cp * dp * pp
    meshes = [ParallelMesh.arithmetic(config, world_size=size, rank=r) for r in range(size)]
    for name in NAMES:
        groups = {getattr(mesh, name).ranks for mesh in meshes}
        assert sorted(itertools.chain(*groups)) == list(range(size))  # a partition
        for rank, mesh in enumerate(meshes):
            group = getattr(mesh, name)
            assert group.ranks[group.rank] == rank
            assert group.ranks == tuple(sorted(group.ranks))
            if name.endswith("_shard"):
                copies = getattr(mesh, name.replace("shard", "copies"))
                assert copies.size == config.replicas
                assert set(group.ranks) & set(copies.ranks) == {rank}
    for view in (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")):
        coords = {tuple(mesh.coords[axis] for axis in view) for mesh in meshes}
        assert len(coords) == size  # each view numbers the ranks without gaps
        assert math.prod(getattr(meshes[0], axis).size for axis in view) == size
    for rank, mesh in enumerate(meshes):  # both views agree on the stage
        assert {meshes[r].coords["pp"] for r in mesh.edp.ranks + mesh.ep.ranks} == {
            meshes[rank].coords["pp"]
        }


def test_a_hundred_thousand_ranks_are_arithmetic() -> None:
    config = ParallelConfig(tp=8, cp=4, pp=25, ep=16, etp=1)
    size = 100_000
    started = time.process_time()
    mesh = ParallelMesh.arithmetic(config, world_size=size, rank=77_777)
    single = time.process_time() - started
    assert mesh.world.size == size
    assert (mesh.dp.size, mesh.edp.size) == (125, 250)
    started = time.process_time()
    resolved = config.resolve(size)
    dense, expert = resolved.dense_view(), resolved.expert_view()
    table = {**dense.table(), **expert.table()}
    groups = {axis: dense.groups([axis]) for axis in dense.axes}
    everything = time.process_time() - started
    assert {axis: int(column[77_777]) for axis, column in table.items()} == mesh.coords
    for axis, rows in groups.items():
        assert len(np.unique(rows)) == size
        row = rows[(rows == 77_777).any(axis=1)][0]
        assert tuple(row.tolist()) == getattr(mesh, axis).ranks
    assert single < 0.1
    assert everything < 1.0


def test_wrong_ranks_are_rejected() -> None:
    with pytest.raises(ValueError, match="rank 4 is not in a world of 4 ranks"):
        ParallelMesh.arithmetic(ParallelConfig(), world_size=4, rank=4)
    with pytest.raises(ValueError, match=r"10 is not a multiple of .* = 4; nearest .*: 8 and 12"):
        ParallelMesh.arithmetic(ParallelConfig(tp=4), world_size=10, rank=0)
    mesh = ParallelMesh.arithmetic(ParallelConfig(tp=2), world_size=4, rank=0)
    with pytest.raises(
        ValueError, match=r"'tp' of 2 ranks is arithmetic only .* ParallelMesh\.create"
    ):
        all_reduce(torch.ones(1), mesh.tp)
    with pytest.raises(
        ValueError, match=r"ranks \[1\] must be different ranks of the world, 0 to 0"
    ):
        ParallelMesh.create(ParallelConfig(), ranks=[1])
    with pytest.raises(ValueError, match=r"world size 1 is not a multiple of .* = 2"):
        ParallelMesh.create(ParallelConfig(tp=2))


# --- with processes -----------------------------------------------------------------------------


def reached(mesh: ParallelMesh, device: str = "cpu") -> dict[str, list[int]]:
    me = torch.tensor([dist.get_rank()], device=device)
    return {name: all_gather(me, getattr(mesh, name)).tolist() for name in NAMES}


def expected(mesh: ParallelMesh, ranks: Sequence[int]) -> dict[str, list[int]]:
    same = ParallelMesh.arithmetic(mesh.config, world_size=len(ranks), rank=mesh.rank)
    return {name: [ranks[r] for r in getattr(same, name).ranks] for name in NAMES}


def create_and_reach(device: str, *texts: str) -> None:
    """Make one mesh after another, each after the last is closed."""
    everyone = range(dist.get_world_size())
    for text in texts:
        mesh = ParallelMesh.create(ParallelConfig.parse(text), device=device)
        assert mesh is not None
        assert mesh.rank == dist.get_rank()
        assert mesh.device.type == device
        assert reached(mesh, device) == expected(mesh, everyone)
        mesh.close()
        mesh.close()
        if mesh.tp.size > 1:
            with pytest.raises(ValueError, match=r"'tp' of ranks .* has been closed"):
                all_reduce(torch.ones(1, device=device), mesh.tp)
        barrier(mesh.world)  # torch's own world, which stays


LAYOUTS = ("tp=2 pp=2", "tp=2 pp=2", "cp=2", "tp=2 ep=4 etp=1", "pp=4", "tp=2 order=dp-tp-pp-cp")


def test_groups_reach_the_ranks_that_arithmetic_says(ranks: RankPool) -> None:
    ranks.run(create_and_reach, 4, "cpu", *LAYOUTS)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_groups_reach_each_other_on_gpus(ranks: RankPool) -> None:
    ranks.run(create_and_reach, 2, "cuda", "tp=2", "pp=2", "tp=2", device="cuda")


def two_meshes(first: list[int], second: list[int]) -> list[dict[str, list[int]] | None]:
    """Different layouts over different, overlapping ranks, used in turn."""
    trainer = ParallelMesh.create(ParallelConfig(tp=2), ranks=first, timeout=timedelta(seconds=30))
    engine = ParallelMesh.create(ParallelConfig(pp=2), ranks=second)
    found: list[dict[str, list[int]] | None] = []
    for mesh, members in ((trainer, first), (engine, second), (trainer, first)):
        inside = dist.get_rank() in members
        assert (mesh is not None) == inside
        found.append(reached(mesh) if mesh else None)
        if mesh is not None:
            assert found[-1] == expected(mesh, members)
            assert mesh.rank == members.index(dist.get_rank())
    if trainer is not None:
        trainer.close()
    if engine is not None:  # not touched by the other's end
        assert reached(engine) == expected(engine, second)
        engine.close()
    return found


def test_several_meshes_over_parts_of_the_world(ranks: RankPool) -> None:
    found = ranks.run(two_meshes, 4, [3, 0, 1, 2], [2, 1])
    assert found[3][0]["tp"] == [3, 0]
    assert found[3][1] is None
    assert found[1][1]["pp"] == [2, 1]
    ranks.run(two_meshes, 4, [0, 1], [3, 2])  # nobody in common


def twins() -> None:
    """Stages make different groups before they meet in a lazily built one."""
    mesh = ParallelMesh.create(ParallelConfig(pp=2))
    assert mesh is not None
    if mesh.is_first_stage:
        extra = Group.create(mesh.dp.ranks, name="extra")
        all_reduce(torch.ones(1), extra)
        extra.close()
    assert mesh.pp.cpu is mesh.pp
    assert mesh.pp.split(1).size == 1
    half = mesh.world.split(2)
    assert all_gather(torch.tensor([dist.get_rank()]), half).tolist() == list(half.ranks)
    mesh.close()


def test_lazy_groups_meet_whatever_their_members_did_before(ranks: RankPool) -> None:
    ranks.run(twins, 4)


def made_and_closed(text: str, times: int) -> None:
    """Nothing is communicated: the first rank to be ready closes what others still connect to."""
    for _ in range(times):
        mesh = ParallelMesh.create(ParallelConfig.parse(text))
        assert mesh is not None
        assert mesh.cp_levels
        mesh.close()


def test_a_mesh_may_be_closed_at_once(ranks: RankPool) -> None:
    ranks.run(made_and_closed, 4, "cp=4 cp-kind=two-level", 15)


def gradient_average(mesh: ParallelMesh) -> float:
    return float(all_reduce(torch.tensor(float(mesh.dp.rank)), mesh.dp_cp))


def shared_groups() -> dict[str, bool]:
    mesh = ParallelMesh.create(ParallelConfig(pp=2))
    assert mesh is not None
    assert gradient_average(mesh) == 1.0
    shared = {
        "dp is dp_cp": mesh.dp is mesh.dp_cp,
        "edp is dp": mesh.edp is mesh.dp,
        "pp is embedding": mesh.pp is mesh.embedding,
        "world is replica": mesh.world is mesh.replica,
    }
    mesh.close()
    return shared


def test_groups_of_one_thread_and_order_share_connections_others_do_not(ranks: RankPool) -> None:
    assert ranks.run(shared_groups, 4)[0] == {
        "dp is dp_cp": True,
        "edp is dp": True,
        "pp is embedding": False,
        "world is replica": False,
    }
