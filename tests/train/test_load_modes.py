"""What a run takes over from a checkpoint: parts of it, of a chosen step, and what does not fit."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.codecs import Codec
from mcore_parallel import ParallelMesh
from mcore_train.load import config_from_tree
from mcore_train.pretrain import pretrain
from mcore_train.session import build_session
from mcore_train.trainer import Trainer

sys.path.append(str(Path(__file__).parent))
from toy import toy, toy_tree

SMALL = {"num_layers": 2, "hidden_size": 16, "ffn_size": 16, "dropout": 0.1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    checkpoint = {"directory": str(folder), "interval": 1, "compression": "zstd"}
    pretrain(toy(model=SMALL, steps=2, checkpoint=checkpoint), nproc=1)
    return folder


def loaded(folder: Path, model: dict[str, Any] | None = None, **load: Any) -> Trainer:
    config = toy(
        model={**SMALL, **(model or {})},
        checkpoint={"load": str(folder), **load},
    )
    trainer = Trainer(build_session(config, ParallelMesh.single()))
    trainer.load()
    return trainer


def values(trainer: Trainer, prefix: str) -> dict[str, torch.Tensor]:
    tensors = trainer.session.optimizer.state_tensors()
    return {key: x.tensor.clone() for key, x in tensors.items() if key.startswith(prefix)}


def weights_equal(trainer: Trainer, checkpoint: Path) -> bool:
    opened = mcore_ckpt.open(checkpoint)
    for held in trainer.session.optimizer.state_tensors().values():
        for fragment, view in held.views():
            if fragment.name.startswith("model/"):
                whole = opened[fragment.name]
                if not torch.equal(view.float(), whole[fragment.box.slices]):
                    return False
    return True


def test_a_chosen_step(trained: Path) -> None:
    """Compressed as they are; the newest without `load_step`, and a missing one is named."""
    assert mcore_ckpt.open(trained).info("model/final_norm.weight").codec == Codec("zstd", 3)
    assert loaded(trained).step == 2
    first = loaded(trained, load_step=1)
    assert first.step == 1
    assert weights_equal(first, trained / "step_00000001")
    assert not weights_equal(first, trained / "step_00000002")
    with pytest.raises(ValueError, match=r"load_step=7: .* has no such checkpoint: use 2"):
        loaded(trained, load_step=7)


def test_without_optimizer_or_random_streams(trained: Path) -> None:
    """Each alone: the step and the place in the data go on, what is left out starts afresh."""
    state = mcore_ckpt.read_state(trained)
    everything = loaded(trained)
    assert any(x.any() for x in values(everything, "exp_avg").values())
    assert everything.session.rng.state_dict() == state["rng"]
    fresh = loaded(trained, load_optimizer=False)
    assert (fresh.step, fresh.progress.consumed) == (2, state["data"]["consumed_samples"])
    assert not any(x.any() for x in values(fresh, "exp_avg").values())
    assert fresh.session.optimizer.step_count == 0
    assert fresh.session.rng.state_dict() == state["rng"]
    assert weights_equal(fresh, trained)
    other = loaded(trained, load_rng=False)
    assert other.session.rng.state_dict() != state["rng"]
    assert other.session.optimizer.step_count == 2
    weights = loaded(trained, weights_only=True)
    assert (weights.step, weights.session.optimizer.step_count) == (0, 0)
    assert weights_equal(weights, trained)


@pytest.mark.parametrize(("first", "second"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_the_precision_may_change_and_masters_stay(tmp_path: Path, first: str, second: str) -> None:
    """Weights and moments come as they were kept, in fp32; parameters are these, rounded once."""
    checkpoint = {"directory": str(tmp_path)}
    pretrain(toy(model=SMALL, steps=2, checkpoint=checkpoint, precision=first), nproc=1)
    opened = mcore_ckpt.open(tmp_path)
    assert {info.dtype for info in opened.manifest.tensors.values()} == {"float32"}
    kept = opened["model/layers.0.mlp.up.weight"]
    assert not torch.equal(kept, kept.bfloat16().float()), "more than a copy in 16 bits"
    trainer = Trainer(
        build_session(
            toy(model=SMALL, checkpoint={"load": str(tmp_path)}, precision=second),
            ParallelMesh.single(),
        )
    )
    trainer.load()
    assert trainer.step == 2
    seen = set()
    for held in trainer.session.optimizer.state_tensors().values():
        assert held.tensor.dtype == torch.float32
        for fragment, view in held.views():
            assert torch.equal(view, opened[fragment.name][fragment.box.slices]), fragment.name
            seen.add(fragment.name)
    assert seen == set(opened)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[second]
    model = trainer.session.model
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype
        for fragment, view in model.specs()[name].layout.views(parameter.detach()):
            expected = opened[f"model/{fragment.name}"][fragment.box.slices].to(dtype)
            assert torch.equal(view, expected), fragment.name


def test_what_does_not_fit(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error by default; or told, in a warning or a line, and the rest is loaded."""
    deeper = {"num_layers": 3}
    with pytest.raises(ValueError, match=r"model.num_layers=3, but .* was trained with 2: use 2"):
        loaded(trained, deeper)
    with pytest.warns(RuntimeWarning, match=r"model.num_layers=3.*missing: .*layers\.2\."):
        warned = loaded(trained, deeper, strict="warn")
    assert warned.step == 2
    assert any(x.any() for x in values(warned, "exp_avg").values())
    loaded(trained, {"ffn_size": 24}, strict="report")
    told = capsys.readouterr().err
    assert told.startswith(f"mcore-train: {trained}")
    assert "mismatched: " in told
    assert "exp_avg/layers.0.mlp.up.weight (checkpoint [16, 16], here [24, 16])" in told
    assert told.count("\n") == 1


def test_the_architecture_of_a_checkpoint(trained: Path, tmp_path: Path) -> None:
    """`model: {checkpoint: …}` needs nothing else, and takes changes."""
    tree = toy_tree()
    tree["model"] = {"checkpoint": str(trained), "dropout": 0.0}
    config = config_from_tree(tree)
    assert config.model == toy(model={**SMALL, "dropout": 0.0}).model
    tree["model"] = {"checkpoint": str(tmp_path)}
    with pytest.raises(ValueError, match=r"model.checkpoint=.*no committed checkpoint"):
        config_from_tree(tree)


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ({"load_step": 3}, "load_step is about checkpoint.load, which is not set"),
        ({"directory": "s4://bucket/run"}, "directory: s4://bucket/run: unknown scheme s4://"),
        ({"directory": Path("s3://bucket/run")}, "directory: s3:/bucket/run has lost a slash"),
        ({"load": "s4://bucket/run"}, "load: s4://bucket/run: .*nearest valid is s3://"),
        (
            {"directory": "x", "local": "s3://bucket/run", "local_interval": 1},
            "local=s3:/bucket/run is no path: local saves go to a directory of each machine",
        ),
        ({"load_rng": False}, "load_rng is about checkpoint.load"),
        ({"load": "x", "weights_only": True, "load_optimizer": False}, "load_optimizer=False does"),
        ({"compression": "zstd"}, "compression=zstd needs checkpoint.directory"),
        ({"directory": "x", "compression": "gzip"}, "compression 'gzip' is unknown"),
    ],
)
def test_options_that_do_nothing(checkpoint: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy(checkpoint=checkpoint)
