"""Validation over shares of the sequence; training over them is in the matrix of parity/."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_parallel import ParallelConfig, ParallelMesh, init_from_env
from mcore_parallel.testing import RankPool
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.session import build_session
from mcore_train.step import evaluate

sys.path.append(str(Path(__file__).parent))
from toy import toy, write_tokens


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


def test_validation_over_shares(ranks: RankPool, tmp_path: Path) -> None:
    """Documents of 1 to 13 tokens, of which each rank has other valid tokens, and padding."""
    data = {
        "mock": False,
        "train": str(write_tokens(tmp_path / "tokens")),
        "split": "8,2",
        "seq_length": 16,
        "eod_id": 0,
        "mask_eod_loss": True,
        "reset_positions": True,
        "reset_attention": True,
    }
    config = toy(data=data)
    session = build_session(config, ParallelMesh.single())
    expected = evaluate(session)
    session.close()
    config = dataclasses.replace(config, parallel=ParallelConfig(cp=2))
    for loss in ranks.run(evaluated, 2, config_to_tree(config), timeout=120):
        assert loss == pytest.approx(expected, rel=1e-6)
