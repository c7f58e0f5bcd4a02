"""Stopping and going on is the same as not stopping."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_parallel import ParallelConfig, RngStreams
from mcore_parallel.testing import RankPool
from mcore_train.callbacks import read_metrics
from mcore_train.config import TrainConfig
from mcore_train.load import config_to_tree
from mcore_train.pretrain import RunSummary, pretrain, pretrain_apart, run_rank

sys.path.append(str(Path(__file__).parent))
from toy import GPT2_DRESS, toy, write_tokens


def run_config(folder: Path, model: dict[str, Any] | None = None, **fields: Any) -> TrainConfig:
    return toy(
        model={"dropout": 0.1, **(model or {})},
        checkpoint={"directory": str(folder), **fields.pop("checkpoint", {})},
        log={"directory": str(folder)},
        # The length of the run is not the length of the schedule: a run can be cut short.
        schedule={"decay_steps": 5},
        **fields,
    )


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = mcore_ckpt.open(folder / f"step_{step:08d}")
    return {name: checkpoint[name] for name in checkpoint}


def training_rows(folder: Path) -> list[tuple[float, ...]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in rows if "loss" in r]


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert list(a) == list(b)
    for name, value in a.items():
        assert value.equal(b[name]), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    pretrain(run_config(folder, steps=6), nproc=1)
    return folder


def test_resume_in_a_new_process_is_bitwise(whole: Path, tmp_path: Path) -> None:
    """U18: 6 steps are 3 + 3 in a new process: loss, rate, parameters and moments, with dropout."""
    assert pretrain(run_config(tmp_path, steps=3), nproc=1).step == 3
    summary = pretrain_apart(run_config(tmp_path, steps=6), nproc=1)
    assert (summary.first_step, summary.step) == (3, 6)
    assert training_rows(tmp_path) == training_rows(whole)
    assert [row[0] for row in training_rows(whole)] == [1, 2, 3, 4, 5, 6]
    ours = tensors(tmp_path, 6)
    assert_same(ours, tensors(whole, 6))
    assert {name.split("/")[0] for name in ours} == {"model", "exp_avg", "exp_avg_sq"}


def test_without_the_random_state_the_result_changes(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U18, the control: a resume that withholds the random streams must differ."""
    pretrain(run_config(tmp_path, steps=3), nproc=1)
    monkeypatch.setattr(RngStreams, "load_state_dict", lambda self, state: None)
    pretrain(run_config(tmp_path, steps=6), nproc=1)
    ours, theirs = tensors(tmp_path, 6), tensors(whole, 6)
    assert any(not ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.parametrize("dress", ["llama", "gpt2"])
@pytest.mark.parametrize("layout", ["dp=2", "tp=2,sp"])
def test_resume_over_two_ranks_is_bitwise(
    ranks: RankPool, tmp_path: Path, layout: str, dress: str
) -> None:
    """U18: the same over two ranks in a new world, with documents read from files."""
    data = {
        "mock": False,
        "train": str(write_tokens(tmp_path / "tokens")),
        "split": "8,2",
        "eod_id": 0,
        "mask_eod_loss": True,
        "reset_positions": True,
        "reset_attention": True,
    }

    def run(folder: Path, steps: int) -> RunSummary:
        config = run_config(
            folder,
            model=GPT2_DRESS if dress == "gpt2" else {},
            data=data,
            batch={"global_size": 8},
            steps=steps,
        )
        config = dataclasses.replace(config, parallel=ParallelConfig.parse(layout))
        summaries = ranks.run(run_rank, 2, config_to_tree(config), timeout=120)
        assert [summary.rank for summary in summaries] == [0, 1]
        found = summaries[0]
        assert isinstance(found, RunSummary)
        return found

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, 6)
    assert run(parts, 3).step == 3
    summary = run(parts, 6)
    assert (summary.first_step, summary.step) == (3, 6)
    assert training_rows(parts) == training_rows(whole)
    assert [row[0] for row in training_rows(whole)] == [1, 2, 3, 4, 5, 6]
    assert_same(tensors(parts, 6), tensors(whole, 6))
    # The run went on into a second epoch of these documents.
    state = mcore_ckpt.read_state(parts)["data"]
    assert 24 < state["sampler"]["num_samples"] < state["consumed_samples"] == 48


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tp=1", "tp=2,pp=2,sp"),
        ("tp=2,dp=2,sp", "pp=2,dp=2"),
        ("pp=4", "tp=1"),
        ("dp=4,zero=3", "dp=2"),
        ("dp=2,zero=0", "dp=4,zero=3,replicas=2"),
    ],
)
def test_resume_under_another_layout(
    ranks: RankPool, whole: Path, tmp_path: Path, first: str, second: str
) -> None:
    """U19, and the dense half of U43: the same samples and result, by the metric of parity."""
    for layout, steps in ((first, 3), (second, 6)):
        parallel = ParallelConfig.parse(layout)
        world = parallel.tp * parallel.pp * (parallel.dp or 1)
        batch = {"global_size": 4, "micro_size": 1}
        config = dataclasses.replace(run_config(tmp_path, steps=steps, batch=batch))
        tree = config_to_tree(dataclasses.replace(config, parallel=parallel))
        ranks.run(run_rank, world, tree, timeout=120)
    for row, wanted in zip(training_rows(tmp_path), training_rows(whole), strict=True):
        assert row[:3] == pytest.approx(wanted[:3], rel=1e-5)  # the loss of the next step, and on
    ours, theirs = tensors(tmp_path, 6), tensors(whole, 6)
    assert list(ours) == list(theirs)
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        names = [name for name in theirs if name.startswith(f"{kind}/")]
        floor = 1e-3 * sum(float(theirs[n].double().square().sum()) for n in names) ** 0.5
        for name in names:
            delta = float(torch.linalg.vector_norm(ours[name].double() - theirs[name].double()))
            allowed = 1e-5 * max(float(torch.linalg.vector_norm(theirs[name].double())), floor)
            # The square of a gradient has twice its relative error.
            assert delta <= allowed * (2 if kind == "exp_avg_sq" else 1), name


def test_tied_embeddings_under_another_padding(ranks: RankPool, tmp_path: Path) -> None:
    """61 tokens are padded to 64 rows, then to 62, with the head on another stage than they.

    What is saved has neither the padding nor the head's copy, and the run goes on as one.
    """
    batch = {"global_size": 4, "micro_size": 1}

    def run(folder: Path, layout: str, steps: int) -> None:
        parallel = ParallelConfig.parse(layout)
        config = run_config(folder, model=GPT2_DRESS, steps=steps, batch=batch)
        tree = config_to_tree(dataclasses.replace(config, parallel=parallel))
        world = parallel.tp * parallel.pp * (parallel.dp or 1)
        ranks.run(run_rank, world, tree, timeout=120)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, "dp=1", 3)
    run(parts, "tp=4", 2)
    run(parts, "tp=2,pp=2,sp", 3)
    for row, wanted in zip(training_rows(parts), training_rows(whole), strict=True):
        assert row[:3] == pytest.approx(wanted[:3], rel=1e-5)
    ours, theirs = tensors(parts, 3), tensors(whole, 3)
    assert list(ours) == list(theirs)
    assert ours["model/embedding.weight"].shape == (61, 32)
    assert "model/lm_head.weight" not in ours
    torch.testing.assert_close(ours["model/embedding.weight"], theirs["model/embedding.weight"])


def test_new_schedule_after_loading(tmp_path: Path) -> None:
    """U20: loaded weights, step reset, another schedule: its rates hold from the first step on."""
    old = tmp_path / "old"
    constant = {"kind": "constant", "lr": 6e-4, "min_lr": 0.0, "warmup_steps": 0}
    config = toy(steps=3, schedule=constant, checkpoint={"directory": str(old)})
    pretrain(config, nproc=1)
    new = tmp_path / "new"
    low = {"kind": "cosine", "lr": 3e-5, "min_lr": 2e-5, "warmup_steps": 0, "decay_steps": 4}
    config = toy(
        steps=5,
        schedule=low,
        checkpoint={"directory": str(new), "load": str(old), "reset_step": True},
        log={"directory": str(new)},
    )
    summary = pretrain(config, nproc=1)
    assert (summary.first_step, summary.step) == (0, 5)
    rates = [row[2] for row in training_rows(new)]
    assert rates[0] == 3e-5
    assert rates[-1] == pytest.approx(2e-5)
    moments = mcore_ckpt.read_state(new)["optimizer"]["step"]
    assert moments == 3 + 5  # the moments went on: their bias correction knows their age


def test_every_parameter_takes_the_new_rate(tmp_path: Path) -> None:
    """U20, every param group: with SGD the first step after loading moves by the new rate.

    Matrices decay, norms do not: with and without decay shows both groups at work.
    """
    matrix, norm = "model/layers.1.mlp.down.weight", "model/layers.1.post_norm.weight"
    sgd = {"kind": "sgd", "weight_decay": 0.0, "clip_norm": None}
    first = {"kind": "constant", "lr": 0.5, "warmup_steps": 0}
    old = tmp_path / "old"
    config = toy(steps=1, optimizer=sgd, schedule=first, checkpoint={"directory": str(old)})
    pretrain(config, nproc=1)
    start = tensors(old, 1)

    def moved(rate: float, weight_decay: float) -> dict[str, torch.Tensor]:
        folder = tmp_path / f"{rate} {weight_decay}"
        config = toy(
            steps=1,
            optimizer={**sgd, "weight_decay": weight_decay},
            schedule={**first, "lr": rate, "min_lr": 0.0},
            checkpoint={"directory": str(folder), "load": str(old), "reset_step": True},
        )
        pretrain(config, nproc=1)
        now = tensors(folder, 1)
        return {name: (now[name] - value).double() for name, value in start.items()}

    high, low = moved(0.5, 0.0), moved(0.05, 0.0)
    for name in start:
        assert high[name].abs().max() > 0
        torch.testing.assert_close(high[name], 10 * low[name], rtol=1e-3, atol=2e-6)
    decayed = moved(0.05, 0.3)
    for name, value in start.items():
        by_decay = decayed[name] - low[name]
        if value.dim() == 1:
            assert by_decay.eq(0).all()
        else:
            expected = -0.05 * 0.3 * value.double()
            torch.testing.assert_close(by_decay, expected, rtol=1e-3, atol=2e-7)
    assert start[norm].dim() == 1
    assert start[matrix].dim() == 2


def test_weights_only_starts_afresh(whole: Path, tmp_path: Path) -> None:
    config = toy(
        steps=2,
        model={"dropout": 0.1},
        checkpoint={"directory": str(tmp_path), "load": str(whole), "weights_only": True},
        evaluate={"at_start": True},
    )
    summary = pretrain(config, nproc=1)
    assert (summary.first_step, summary.step) == (0, 2)
    assert mcore_ckpt.read_state(tmp_path)["optimizer"]["step"] == 2
    rows = read_metrics(whole / "metrics.jsonl")
    last = [row["validation_loss"] for row in rows if "validation_loss" in row][-1]
    assert summary.first_validation_loss == last


def test_other_data_are_refused(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "tokens")
    data = {"mock": False, "train": str(prefix), "split": "8,2"}
    config = run_config(tmp_path / "run", steps=2, data=data)
    pretrain(config, nproc=1)
    other = write_tokens(tmp_path / "other", documents=90)
    config = run_config(tmp_path / "run", steps=4, data={**data, "train": str(other)})
    with pytest.raises(ValueError, match="num_samples"):
        pretrain(config, nproc=1)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    config = toy(checkpoint={"load": str(tmp_path / "nowhere")})
    with pytest.raises(ValueError, match=r"nowhere.*no committed checkpoint"):
        pretrain(config, nproc=1)


def test_another_architecture_is_refused_by_name(whole: Path, tmp_path: Path) -> None:
    config = toy(model={"ffn_size": 64}, checkpoint={"load": str(whole)})
    with pytest.raises(ValueError, match=r"model.ffn_size=64, but .* was trained with 48: use 48"):
        pretrain(config, nproc=1)


def test_keep_last(tmp_path: Path) -> None:
    config = run_config(tmp_path, steps=5, checkpoint={"interval": 2, "keep_last": 2})
    summary = pretrain(config, nproc=1)
    assert [path.name for path in mcore_ckpt.list_checkpoints(tmp_path)] == [
        "step_00000004",
        "step_00000005",
    ]
    assert summary.checkpoint == tmp_path / "step_00000005"
    saved = [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl") if "saved" in row]
    assert saved == [2, 4, 5]
