"""Recomputed activations as a choice of a training run; under layouts they are in parity/."""

import dataclasses
from pathlib import Path

import pytest
import torch

from mcore_models.common.recompute import RecomputeConfig
from mcore_parallel import ParallelMesh
from mcore_train.cli import main
from mcore_train.load import config_from_tree, config_to_tree, load_config
from mcore_train.parity import comparable, record
from mcore_train.parity.cells import RECOMPUTE
from mcore_train.parity.families import STEPS, family_config, write_documents


def test_training_is_bitwise_the_same(tmp_path: Path) -> None:
    """U27: losses, auxiliary ones, gradients and parameters, with dropout and packed documents."""
    config = comparable(
        family_config("hybrid", tokens=write_documents(tmp_path / "tokens", "hybrid"))
    )
    plain = record(config, ParallelMesh.single(), STEPS)
    assert plain is not None
    for name in ("full", "selective"):
        again = dataclasses.replace(config, recompute=RECOMPUTE[name])
        found = record(again, ParallelMesh.single(), STEPS)
        assert found is not None
        assert (found.losses, found.auxiliary) == (plain.losses, plain.auxiliary)
        for kind in ("gradients", "parameters"):
            for tensor, value in getattr(plain, kind).items():
                assert torch.equal(getattr(found, kind)[tensor], value), (name, kind, tensor)


def test_a_config_says_what_is_recomputed() -> None:
    words = ["--recompute.mode", "selective", "--recompute.parts", "[core_attn, norm]"]
    config = load_config("quickstart", words)
    assert config.recompute == RecomputeConfig(mode="selective", parts=("core_attn", "norm"))
    assert config_from_tree(config_to_tree(config)) == config
    assert comparable(config).recompute == RecomputeConfig()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--recompute.mode selective --recompute.parts [moe]", "this model has no 'moe'; it has"),
        ("--recompute.mode full --recompute.first_layers 99", "layers: use "),
        ("--recompute.mode full --recompute.spread true", "tp=1; use spread=false"),
        ("--recompute.mode half", "recompute.mode: input should be 'none', 'full' or 'selective'"),
    ],
)
def test_what_does_not_fit_is_one_line(
    capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    assert main(["pretrain", "--config", "quickstart", *options.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
