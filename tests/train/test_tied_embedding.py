"""Tied embeddings on two pipeline stages are one parameter, whatever sharding and overlap do."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_parallel import GradientBuckets, ParallelConfig, ParallelMesh, init_from_env
from mcore_parallel.data import main_grad
from mcore_parallel.testing import RankPool
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.schedules import learning_rate
from mcore_train.session import build_session
from mcore_train.step import Step

sys.path.append(str(Path(__file__).parent))
from toy import GPT2_DRESS, toy

STEPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copies:
    """The embedding of one rank: before, after every step, and its own share of the gradient."""

    replica: int
    stage: int
    values: list[torch.Tensor]
    shares: list[torch.Tensor]


def train_rank(tree: dict[str, Any]) -> Copies:
    config = config_from_tree(tree)
    init_from_env(device="cpu")
    mesh = ParallelMesh.create(config.parallel)
    assert mesh is not None
    session = build_session(config, mesh)
    weight = session.model.get_parameter("embedding.weight")
    values = [weight.detach().clone()]
    shares = []
    step, batches = Step(session), session.data.batches()
    finish = GradientBuckets.finish

    def note(self: GradientBuckets) -> None:
        shares.append(main_grad(weight).clone())
        finish(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientBuckets, "finish", note)
        for index in range(STEPS):
            lr = learning_rate(config.schedule, index, config.steps)
            step(next(batches), lr=lr, rng=session.rng.next("dropout"))
            session.optimizer.wait()
            values.append(weight.detach().clone())
    session.close()
    replica, stage = mesh.dp.rank, mesh.pp.rank
    mesh.close()
    return Copies(replica=replica, stage=stage, values=values, shares=shares)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("zero", [True, False])
def test_the_two_copies_stay_bit_equal(ranks: RankPool, overlap: bool, zero: bool) -> None:
    """U31: pp 2, dp 2: after every step all four copies are the same bits."""
    config = toy(
        model={**GPT2_DRESS, "dropout": 0.1}, batch={"global_size": 8, "micro_size": 2}, steps=STEPS
    )
    parallel = ParallelConfig(
        pp=2, dp=2, overlap=overlap, sharding="optimizer" if zero else "none", bucket_size=700
    )  # many buckets: the embedding is not in the only one
    tree = config_to_tree(dataclasses.replace(config, parallel=parallel))
    found: list[Copies] = ranks.run(train_rank, 4, tree, timeout=120)
    assert {(rank.replica, rank.stage) for rank in found} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for rank in found[1:]:
        for ours, theirs in zip(rank.values, found[0].values, strict=True):
            assert ours.equal(theirs)
    for before, after in zip(found[0].values, found[0].values[1:], strict=False):
        assert not before.equal(after)
    # The ends of the pipeline had something different to contribute.
    first, last = (next(r for r in found if r.stage == stage) for stage in (0, 1))
    for ours, theirs in zip(first.shares, last.shares, strict=True):
        assert ours.any()
        assert theirs.any()
        assert not ours.equal(theirs)
