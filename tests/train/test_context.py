"""Training with the sequence shared out over ranks equals training in one process."""

import dataclasses
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mcore_parallel import ParallelConfig, ParallelMesh, init_from_env
from mcore_parallel.testing import RankPool
from mcore_train.config import TrainConfig
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.parity import (
    LEAST_MARGIN,
    Record,
    comparable,
    compare,
    record,
    record_rank,
    world_size,
)
from mcore_train.session import build_session
from mcore_train.step import evaluate

sys.path.append(str(Path(__file__).parent))
from toy import GPT2_DRESS, toy, write_tokens

STEPS = 3
MOE = {
    "num_experts": 4,
    "top_k": 2,
    "expert_ffn_size": 24,
    "aux_loss_coefficient": 0.01,
    "aux_loss_scope": "sequence",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": GPT2_DRESS,
    "packed": {},
    # Weights, and a seed, with which experts that compete have clearly different scores.
    "moe": {"moe": MOE, "init_std": 0.1},
    "packed moe": {"moe": MOE, "init_std": 0.1},
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens") / "toy")


@pytest.fixture(scope="module")
def reference(prefix: Path) -> Callable[[str, int], tuple[TrainConfig, Record]]:
    """The config of a kind, and its run in one process; each is made once."""

    @cache
    def of(kind: str, global_size: int) -> tuple[TrainConfig, Record]:
        fields: dict[str, Any] = {}
        if "packed" in kind:  # documents of 1 to 13 tokens, uneven for every number of ranks
            fields["data"] = {
                "mock": False,
                "train": str(prefix),
                "split": "8,2",
                "seq_length": 16,
                "eod_id": 0,
                "mask_eod_loss": True,
                "reset_positions": True,
                "reset_attention": True,
            }
        model = {**MODELS[kind], "dropout": 0.1}
        batch = {"global_size": global_size}
        config = comparable(toy(model=model, batch=batch, steps=STEPS, seed=6, **fields))
        found = record(config, ParallelMesh.single(), STEPS)
        assert found is not None
        return config, found

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("llama", "cp=2"),
        ("llama", "cp=4"),
        ("llama", "cp=2,tp=2,sp"),
        ("gpt2", "cp=2,tp=2"),
        ("gpt2", "cp=2,dp=2"),
        ("gpt2", "cp=2,pp=2,schedule=zb-h1"),
        ("gpt2", "cp=2,pp=2,tp=2,dp=2,sp"),
        ("packed", "cp=4"),
        ("packed", "cp=2,tp=2,sp"),
        ("packed", "cp=2,pp=2"),
        ("packed", "cp=2,dp=2,zero=0"),
        ("moe", "cp=2,ep=2"),
        ("packed moe", "cp=2,tp=2,ep=2,sp"),
    ],
)
def test_layouts_equal_one_process(
    ranks: RankPool,
    reference: Callable[[str, int], tuple[TrainConfig, Record]],
    kind: str,
    layout: str,
) -> None:
    """U26, U28 and U29: loss, every gradient and the parameters after three steps, with dropout.

    Packed micro-batches have other valid tokens on each rank, and padding that counts nowhere.
    """
    parallel = ParallelConfig.parse(layout)
    size = world_size(parallel)
    config, single = reference(kind, 4 * (parallel.dp or 1))
    assert single.margin > LEAST_MARGIN
    config = dataclasses.replace(config, parallel=parallel)
    assert config.check_world(size).micro_batches == 2
    found = ranks.run(record_rank, size, config_to_tree(config), STEPS, timeout=200)[0]
    report = compare(single, found, layout=layout, world_size=size)
    assert report.holds, report.first_failure()
    names = {d.name for d in report.differences if d.kind == "gradient"}
    assert names == set(single.gradients)


def evaluated(tree: dict[str, Any]) -> float:
    config = config_from_tree(tree)
    place = init_from_env(device="cpu")
    mesh = ParallelMesh.create(config.parallel, device=place.device)
    assert mesh is not None
    session = build_session(config, mesh)
    loss = evaluate(session)
    session.close()
    mesh.close()
    return loss


def test_validation_over_shares(
    ranks: RankPool, reference: Callable[[str, int], tuple[TrainConfig, Record]]
) -> None:
    config, _ = reference("packed", 4)
    session = build_session(config, ParallelMesh.single())
    expected = evaluate(session)
    session.close()
    config = dataclasses.replace(config, parallel=ParallelConfig(cp=2))
    for loss in ranks.run(evaluated, 2, config_to_tree(config), timeout=120):
        assert loss == pytest.approx(expected, rel=1e-6)
