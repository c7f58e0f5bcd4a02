"""Training under every pipeline schedule equals training in one process."""

import dataclasses
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_parallel import ParallelConfig, ParallelMesh, init_from_env
from mcore_parallel.testing import RankPool
from mcore_train.config import TrainConfig
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.parity import Record, comparable, compare, record, record_rank, world_size
from mcore_train.pretrain import run_rank
from mcore_train.session import build_session
from mcore_train.step import Step, evaluate

sys.path.append(str(Path(__file__).parent))
from toy import GPT2_DRESS, toy

STEPS = 3
DRESSES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tied_embeddings": True},
}
VIRTUAL = "pp=2,chunks=2,schedule=interleaved"

Reference = Callable[..., tuple[TrainConfig, Record]]


@pytest.fixture(scope="module")
def reference() -> Reference:
    """The config of a dress, and its run in one process; each is made once."""

    @cache
    def of(dress: str, samples: int) -> tuple[TrainConfig, Record]:
        batch = {"global_size": samples, "micro_size": 1}
        model = {**DRESSES[dress], "dropout": 0.1}
        config = comparable(toy(model=model, batch=batch, steps=STEPS))
        found = record(config, ParallelMesh.single(), STEPS)
        assert found is not None
        return config, found

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dress", "layout", "samples"),
    [
        ("llama", "pp=4,schedule=zb-h1", 5),
        # The first chunk of stage 0 has nothing but the embedding, which its last one uses, too.
        ("tied", "pp=2,chunks=2,schedule=zb-v,stages=E|t|tt|tL,bucket=700", 4),
    ],
)
def test_schedules_equal_one_process(
    ranks: RankPool, reference: Reference, dress: str, layout: str, samples: int
) -> None:
    """U05, U31: loss, every gradient and the parameters after three steps, with dropout.

    Beside what the matrix in parity/ has: more stages, a number of micro-batches that fits nothing.
    """
    parallel = ParallelConfig.parse(layout)
    config, single = reference(dress, samples)
    config = dataclasses.replace(config, parallel=parallel)
    size = world_size(parallel)
    assert config.check_world(size).micro_batches == samples // (parallel.dp or 1)
    found = ranks.run(record_rank, size, config_to_tree(config), STEPS, timeout=200)[0]
    report = compare(single, found, layout=layout, world_size=size)
    assert report.holds, report.first_failure()
    assert {d.name for d in report.differences if d.kind == "gradient"} == set(single.gradients)


def split_gradients(tree: dict[str, Any]) -> tuple[bool, dict[str, torch.Tensor], float]:
    """One accumulation: is anything deferred, this rank's buckets, and the validation loss."""
    config = config_from_tree(tree)
    init_from_env(device="cpu")
    mesh = ParallelMesh.create(config.parallel)
    assert mesh is not None
    session = build_session(config, mesh)
    step = Step(session)
    step.accumulate(next(session.data.batches()), session.rng.next("dropout"))
    found = {name: view.tensor.clone() for name, view in session.buckets.gradients().items()}
    loss = evaluate(session)
    session.close()
    mesh.close()
    return step.weight_gradients is not None, found, loss


@pytest.mark.slow
def test_a_split_backward_gives_the_gradients_of_1f1b(ranks: RankPool) -> None:
    """The same products in another order: bit by bit, up to the order of micro-batches."""
    found = {}
    for schedule in ("1f1b", "zb-h1"):
        parallel = ParallelConfig.parse(f"pp=2,schedule={schedule}")
        config = toy(batch={"global_size": 4, "micro_size": 1})
        tree = config_to_tree(dataclasses.replace(config, parallel=parallel))
        found[schedule] = ranks.run(split_gradients, 2, tree, timeout=120)
    for plain, split in zip(found["1f1b"], found["zb-h1"], strict=True):
        assert (plain[0], split[0]) == (False, True)
        assert plain[2] == split[2]
        for name, gradient in plain[1].items():
            assert gradient.equal(split[1][name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [("tp=1", "pp=2,chunks=2,schedule=zb-v"), ("pp=4", VIRTUAL)],
)
def test_checkpoints_pass_between_virtual_and_plain_stages(
    ranks: RankPool, tmp_path: Path, first: str, second: str
) -> None:
    """Layers keep their global names: 2 steps under one layout, 2 more under another."""

    def run(folder: Path, layout: str, steps: int) -> None:
        parallel = ParallelConfig.parse(layout)
        config = toy(
            model={**GPT2_DRESS, "dropout": 0.1},
            batch={"global_size": 4, "micro_size": 1},
            checkpoint={"directory": str(folder)},
            log={"directory": str(folder)},
            schedule={"decay_steps": 4},
            steps=steps,
        )
        tree = config_to_tree(dataclasses.replace(config, parallel=parallel))
        ranks.run(run_rank, world_size(parallel), tree, timeout=120)

    run(tmp_path / "a", first, 2)
    run(tmp_path / "a", second, 4)
    run(tmp_path / "b", second, 4)
    ours, theirs = (mcore_ckpt.open(tmp_path / side / "step_00000004") for side in "ab")
    assert list(ours) == list(theirs)
    names = [name for name in ours if name.startswith("model/")]
    assert len(names) > 40
    scale = sum(float(theirs[name].square().sum()) for name in names) ** 0.5
    for name in names:
        off = float(torch.linalg.vector_norm(ours[name] - theirs[name]))
        assert off <= 1e-5 * max(float(torch.linalg.vector_norm(theirs[name])), 1e-3 * scale), name


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("pp=4,chunks=2,schedule=interleaved", r"4 layers are fewer than pp × chunks = 4 × 2 = 8"),
        ("pp=2,stages=2+1", r"\[2, 1\] sum to 3, not to 4 layers"),
        ("pp=2,first=5", "first = 5 leaves -1 of 4 layers for 1 other stages"),
    ],
)
def test_layers_that_do_not_fit_are_refused_before_anything_is_built(
    layout: str, message: str
) -> None:
    """U05: a clear rejection with the numbers."""
    config = dataclasses.replace(toy(), parallel=ParallelConfig.parse(layout))
    with pytest.raises(ValueError, match=message):
        config.check_world(world_size(config.parallel))
