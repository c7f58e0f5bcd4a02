"""Training that goes on from a checkpoint of Megatron-LM."""

import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.convert import convert
from mcore_parallel import ParallelMesh
from mcore_train.load import config_from_tree
from mcore_train.session import build_session
from mcore_train.trainer import Trainer

sys.path.append(str(Path(__file__).parent))
from toy import toy_tree

FIXTURES = Path(__file__).parents[1] / "models" / "megatron" / "fixtures"


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    with tarfile.open(FIXTURES / "reshardable.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    convert(("megatron", tmp_path / "reshardable"), ("native", tmp_path / "run"))
    return tmp_path / "run"


def _load(run: Path, **checkpoint: Any) -> Trainer:
    state = mcore_ckpt.open(run).state
    tree = toy_tree(checkpoint={"load": str(run), **checkpoint})
    tree["model"] = state["config"]["model"]
    made = config_from_tree(tree)
    mesh = ParallelMesh.create(made.parallel)
    assert mesh is not None
    trainer = Trainer(build_session(made, mesh))
    trainer.load()
    return trainer


def test_weights_moments_and_steps_are_taken_over(converted: Path) -> None:
    trainer = _load(converted, reset_step=True)
    stored = mcore_ckpt.open(converted)
    seen = set()
    for value in trainer.session.optimizer.state_tensors().values():
        for fragment, view in value.views():
            assert torch.equal(view, stored[fragment.name][fragment.box.slices])
            seen.add(fragment.name)
    assert seen == set(stored)
    assert trainer.session.optimizer.state_dict()["step"] == 2
    assert trainer.step == 0
    trainer.session.close()


def test_what_others_do_not_have_is_asked_for(converted: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no place in the data: set checkpoint\.load with reset_step"
    ):
        _load(converted)
    convert(("native", converted), ("native", tmp_path / "weights"))
    with pytest.raises(ValueError, match=r"holds weights alone: set .* with weights_only"):
        _load(tmp_path / "weights", reset_step=True)
    _load(tmp_path / "weights", weights_only=True).session.close()
