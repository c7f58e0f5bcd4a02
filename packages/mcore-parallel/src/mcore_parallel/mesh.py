"""`ParallelMesh`: the groups of one rank, as a value that is passed in."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mcore_parallel import _torch
from mcore_parallel.axes import AxisView
from mcore_parallel.config import ParallelConfig
from mcore_parallel.group import Group

# The axes along which the members of each group differ.
_DENSE_GROUPS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("dp", "cp"),
    "replica": ("tp", "cp", "pp"),
    "world": ("tp", "cp", "dp", "pp"),
}
_EXPERT_GROUPS: dict[str, tuple[str, ...]] = {"ep": ("ep",), "etp": ("etp",), "edp": ("edp",)}
# The same where dp and edp are cut in two by `replicas`.
_SHARDED_GROUPS: dict[str, tuple[str, ...]] = {
    "dp_shard": ("dp", "cp"),
    "dp_copies": ("dp_copies",),
}
_SHARDED_EXPERT_GROUPS: dict[str, tuple[str, ...]] = {
    "edp_shard": ("edp",),
    "edp_copies": ("edp_copies",),
}
# Groups that may share one process group when they have the same ranks: those whose collectives one
# thread issues in one order. Others stay apart: pp waits for neighbours, replica serves the data
# thread, and embedding is reduced at different moments of the pipeline.
_SHARING = (
    ("tp", "etp"),
    ("dp", "dp_cp", "edp", "dp_shard", "dp_copies", "edp_shard", "edp_copies"),
)


@dataclass(frozen=True, eq=False)
class ParallelMesh:
    """The ranks of one parallel layout, seen from one of them.

    config: with dp and etp filled in. rank: mine, counted within the mesh. device: where this rank
    computes. world: all ranks of the mesh (`Group.ranks` are torch.distributed ranks).
    tp, cp, dp, pp: along the axes of the dense view; ep, etp, edp: of the expert view.
    dp_cp: the ranks that hold the same dense parameters (gradients are reduced over it).
    dp_shard, dp_copies: dp_cp as the ranks that hold one share each of what `config.sharding` says,
    times those that hold the same share (`config.replicas` of them); edp_shard, edp_copies: edp.
    replica: the ranks that work on the same samples (tp × cp × pp): one of them reads data.
    embedding: the stages with otherwise my coordinates that hold the beginning and the end of the
    model, and so the two copies of a tied embedding; size 1 where one stage holds both, and on the
    stages between.
    """

    config: ParallelConfig
    rank: int
    device: torch.device
    world: Group
    tp: Group
    cp: Group
    dp: Group
    pp: Group
    ep: Group
    etp: Group
    edp: Group
    dp_cp: Group
    dp_shard: Group
    dp_copies: Group
    edp_shard: Group
    edp_copies: Group
    replica: Group
    embedding: Group

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the first pipeline stage (embedding)."""
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the end of the model (head and loss): its last chunk.

        The last stage, except where the line of chunks turns back to the first (zb-v).
        """
        return self.pp.rank == _end_of_line(self.config)

    @property
    def coords(self) -> dict[str, int]:
        """My coordinate along tp, cp, dp, pp and along etp, ep, edp."""
        axes = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
        return {axis: getattr(self, axis).rank for axis in axes}

    @property
    def cp_levels(self) -> dict[int, tuple[Group, Group]]:
        """The context axis as parts of neighbours, and rings over the parts, by ranks of a part.

        For each of `config.context_parts` my part, over which heads are exchanged (made at the
        first use, by all of its ranks together), and my ring: arithmetic, since its ranks send to
        each other through `cp`.
        """
        cp, levels = self.cp, {}
        for size in self.config.context_parts:
            ring = cp.ranks[cp.rank % size :: size]
            place = Group(cp.rank // size, len(ring), ring, None, f"{cp.name} ring")
            levels[size] = cp.split(size), place
        return levels

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> ParallelMesh:
        """Return the mesh of one rank, which needs no torch.distributed."""
        mesh = cls.arithmetic(ParallelConfig(), world_size=1, rank=0)
        return cls(**{**vars(mesh), "device": torch.device(device)})

    @classmethod
    def arithmetic(cls, config: ParallelConfig, *, world_size: int, rank: int) -> ParallelMesh:
        """Return the mesh that rank `rank` of `world_size` would see, without any process.

        Its groups know their ranks; collectives over those larger than 1 raise ValueError, as does
        a configuration that does not fit the world.
        """
        config = config.resolve(world_size)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size} ranks")
        members = _members(config, rank)
        groups = {name: _arithmetic_group(name, ranks, rank) for name, ranks in members.items()}
        return cls(config=config, rank=rank, device=torch.device("cpu"), **groups)

    @classmethod
    def create(
        cls,
        config: ParallelConfig,
        *,
        ranks: Sequence[int] | None = None,
        device: str | torch.device = "cpu",
        backend: str | None = None,
        timeout: datetime.timedelta | None = None,
    ) -> ParallelMesh | None:
        """Return a mesh over the world, or over `ranks` of it, with groups that communicate.

        Every rank of the world calls this, for all meshes in one agreed order; a rank that is not
        among `ranks` gets None. `ranks` are torch.distributed ranks; the i-th is mesh rank i.
        Without torch.distributed the only mesh is that of one rank. `backend` defaults to gloo for
        the CPU and nccl for CUDA; `timeout` to the world's. ValueError when the configuration does
        not fit the number of ranks. `close()` destroys the groups; then another can be made.
        """
        ready = dist.is_available() and dist.is_initialized()
        mine = dist.get_rank() if ready else 0
        size = dist.get_world_size() if ready else 1
        ranks = tuple(range(size)) if ranks is None else tuple(ranks)
        _check_ranks(ranks, size)
        config = config.resolve(len(ranks))
        if mine not in ranks:
            return None
        if ready:
            _torch.withdraw_fault()
        device = _device(device)
        backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        rank = ranks.index(mine)
        groups: dict[str, Group] = {}
        for name, members in _members(config, rank).items():
            global_ranks = tuple(ranks[member] for member in members)
            group = _shared(groups, name, global_ranks)
            if group is None and name == "world" and _world_serves(global_ranks, device, backend):
                group = Group.world()
            groups[name] = group or Group.create(
                global_ranks, name=name, backend=backend, timeout=timeout
            )
        return cls(config=config, rank=rank, device=device, **groups)

    def close(self) -> None:
        """Destroy the process groups that this mesh made; all its ranks call it together."""
        for group in (
            *(self.tp, self.cp, self.dp, self.pp, self.ep, self.etp, self.edp),
            *(self.dp_shard, self.dp_copies, self.edp_shard, self.edp_copies),
            *(self.dp_cp, self.replica, self.embedding, self.world),
        ):
            group.close()


def _members(config: ParallelConfig, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the mesh ranks of every group of `rank`."""
    dense, expert, copies = config.dense_view(), config.expert_view(), config.replicas
    views: tuple[tuple[AxisView, dict[str, tuple[str, ...]]], ...] = (
        (dense, _DENSE_GROUPS),
        (expert, _EXPERT_GROUPS),
        (dense.split("dp", copies), _SHARDED_GROUPS),
        (expert.split("edp", copies), _SHARDED_EXPERT_GROUPS),
    )
    members = {
        name: view.members(rank, axes) for view, groups in views for name, axes in groups.items()
    }
    stages = members["pp"]
    ends = (stages[0], stages[_end_of_line(config)])
    members["embedding"] = ends if ends[0] != ends[1] and rank in ends else (rank,)
    return members


def _end_of_line(config: ParallelConfig) -> int:
    """The pipeline stage that holds the last chunk."""
    return config.line.place(config.line.last)[0]


def _arithmetic_group(name: str, ranks: tuple[int, ...], rank: int) -> Group:
    return Group(ranks.index(rank), len(ranks), ranks, None, name)


def _shared(groups: dict[str, Group], name: str, ranks: tuple[int, ...]) -> Group | None:
    """Return an earlier group that may serve as `name`, too."""
    for family in _SHARING:
        for other in family:
            if name in family and other in groups and groups[other].ranks == ranks:
                return groups[other]
    return None


def _world_serves(ranks: tuple[int, ...], device: torch.device, backend: str) -> bool:
    """Whether torch's own world is the group of these ranks over this backend."""
    if len(ranks) == 1 or ranks != tuple(range(dist.get_world_size())):
        return False
    return f"{device.type}:{backend}" in dist.get_backend_config().split(",")


def _check_ranks(ranks: tuple[int, ...], world_size: int) -> None:
    outside = [rank for rank in ranks if not 0 <= rank < world_size]
    if outside or len(set(ranks)) != len(ranks) or not ranks:
        raise ValueError(
            f"ranks {list(ranks)} must be different ranks of the world, 0 to {world_size - 1}"
        )


def _device(device: str | torch.device) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
