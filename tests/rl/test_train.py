"""Whole runs of a tiny model: the same under every layout, after every stop, and with every cut."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_ckpt
from mcore_data import ByteTokenizer
from mcore_inference import LLM, SamplingParams
from mcore_parallel import ParallelConfig, ParallelMesh
from mcore_parallel.testing import RankPool
from mcore_rl import (
    EpisodeError,
    PolicyStep,
    RLSummary,
    RolloutEngines,
    Tasks,
    run_rank,
    train,
)
from mcore_rl.plot import plot_rewards
from mcore_train import Trainer, build_session, config_to_tree
from mcore_train.callbacks import Callback, read_metrics

sys.path.append(str(Path(__file__).parent))
from small_runs import config

TOKENIZER = ByteTokenizer()
NUMBERS = (
    "reward",
    "reward_std",
    "response_length",
    "loss",
    "grad_norm",
    "clip_fraction",
    "kl",
    "entropy",
    "log_prob_difference_mean",
    "log_prob_difference_max",
)
"""What is logged at every step."""


def run(folder: Path, **sections: Any) -> RLSummary:
    """One process; metrics and checkpoints below `folder`."""
    return train(config(**places(folder, sections)), nproc=1)


def run_here(tree: dict[str, Any]) -> RLSummary:
    """As a rank: importing this module, it finds the environments of these tests."""
    return run_rank(tree)


def places(folder: Path, sections: Mapping[str, Any]) -> dict[str, Any]:
    checkpoint = {"directory": str(folder), **sections.get("checkpoint", {})}
    return {**sections, "log": {"directory": str(folder)}, "checkpoint": checkpoint}


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of the steps, without what a clock says."""
    found = [row for row in read_metrics(folder / "metrics.jsonl") if "reward" in row]
    return [{k: v for k, v in row.items() if "second" not in k} for row in found]


def held_out(folder: Path) -> list[tuple[int, float]]:
    found = read_metrics(folder / "metrics.jsonl")
    return [(row["step"], row["held_out_reward"]) for row in found if "held_out_reward" in row]


def tensors(folder: Path, step: int) -> dict[str, Tensor]:
    checkpoint = mcore_ckpt.open(folder / f"step_{step:08d}")
    return {name: checkpoint[name] for name in checkpoint}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    for name, value in a.items():
        assert value.equal(b[name]), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps with two updates each and a distance to the reference, in one process."""
    folder = tmp_path_factory.mktemp("whole")
    summary = run(folder, updates=2, loss={"kl_coefficient": 0.1})
    assert (summary.rank, summary.first_step, summary.step) == (0, 0, 3)
    assert summary.checkpoint == folder / "step_00000003"
    assert all(row["reward_std"] > 0.1 for row in rows(folder)), "nothing to learn from"
    assert (summary.first_reward, summary.reward) == (
        rows(folder)[0]["reward"],
        rows(folder)[-1]["reward"],
    )
    return folder


def test_every_step_is_logged(whole: Path) -> None:
    found = rows(whole)
    assert [row["step"] for row in found] == [1, 2, 3]
    for row in found:
        for name in (*NUMBERS, "kl_reference"):
            assert isinstance(row[name], float), name
        # Before the first update of a step both sides hold the same weights.
        assert 0 < row["log_prob_difference_mean"] <= row["log_prob_difference_max"] < 1e-5
        assert 3 < row["response_length"] <= 6
        assert row["tokens"] == round(16 * row["response_length"])
        assert row["grad_norm"] > 0
        assert row["entropy"] > 0
        # Of the second update: the first changed the policy.
        assert row["kl"] > 1e-7
        assert row["kl_reference"] > 1e-7
    assert [step for step, _ in held_out(whole)] == [0, 3]
    assert (whole / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_run(whole: Path, tmp_path: Path) -> None:
    run(tmp_path / "a", updates=2, loss={"kl_coefficient": 0.1})
    assert rows(tmp_path / "a") == rows(whole)
    assert_same(tensors(tmp_path / "a", 3), tensors(whole, 3))
    run(tmp_path / "b", updates=2, loss={"kl_coefficient": 0.1}, seed=6, steps=1)
    assert rows(tmp_path / "b")[0]["loss"] != rows(whole)[0]["loss"]


def test_resume_is_bitwise(whole: Path, tmp_path: Path) -> None:
    """U18 for rollouts: 3 steps are 1 + 2 in a new trainer; weights, moments and every number.

    The reference is that of the run's start, not of the resume.
    """
    settings = {"updates": 2, "loss": {"kl_coefficient": 0.1}}
    assert run(tmp_path, steps=1, **settings).step == 1
    summary = run(tmp_path, **settings)
    assert (summary.first_step, summary.step) == (1, 3)
    assert rows(tmp_path) == rows(whole)
    assert_same(tensors(tmp_path, 3), tensors(whole, 3))
    again = run(tmp_path, **settings)
    assert (again.first_step, again.step, again.reward) == (3, 3, None)


def test_starting_from_weights_makes_them_the_reference(whole: Path, tmp_path: Path) -> None:
    start = {"load": str(whole), "weights_only": True}
    settings: dict[str, Any] = {"loss": {"kl_coefficient": 0.1}, "checkpoint": start}
    run(tmp_path / "a", steps=2, **settings)
    first = rows(tmp_path / "a")
    assert first[0]["kl_reference"] == pytest.approx(0, abs=1e-9)
    assert first[1]["kl_reference"] > 1e-6
    start["load"] = f"tensorstore+file://{whole}"  # the same objects, by an address
    run(tmp_path / "b", steps=1, **settings)
    run(tmp_path / "b", steps=2, **settings)
    assert rows(tmp_path / "b") == first


def test_the_checkpoint_generates(whole: Path) -> None:
    """What the run leaves is a checkpoint like any other, tokenizer included."""
    llm = LLM.from_checkpoint(whole)
    answer = llm.generate("123", SamplingParams(max_tokens=2))[0]
    assert len(answer.token_ids) >= 1
    weights = tensors(whole, 3)
    held = dict(llm.model.named_parameters())
    assert held["embedding.weight"][:257].equal(weights["model/embedding.weight"])


@pytest.mark.parametrize(
    ("micro_size", "aggregation"), [(1, "token"), (8, "sequence"), (16, "constant")]
)
def test_micro_batches_change_nothing(tmp_path: Path, micro_size: int, aggregation: str) -> None:
    """U26 for every aggregation: reward, loss and norm do not depend on the forward passes."""
    for name, size in (("a", micro_size), ("b", 4)):
        loss = {"aggregation": aggregation}
        run(tmp_path / name, steps=2, updates=2, batch={"micro_size": size}, loss=loss)
    for ours, theirs in zip(rows(tmp_path / "a"), rows(tmp_path / "b"), strict=True):
        assert_close(ours, theirs)


def assert_close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Rewards and lengths are equal, sums of floats up to their order."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if name in ("step", "tokens", "reward", "reward_std", "response_length"):
            assert ours[name] == value, name
        elif "difference" in name:
            assert ours[name] < 1e-5
        else:
            assert ours[name] == pytest.approx(value, rel=1e-3, abs=2e-6), name


@pytest.mark.parametrize(
    ("layout", "world", "engine"),
    [
        ("tp=2", 2, 1),
        ("dp=2", 2, 1),
        ("pp=2", 2, 1),
        ("tp=2,sp", 2, 2),
        ("dp=2,zero=3", 2, 2),
        ("tp=2,pp=2", 4, 2),
    ],
)
def test_layouts_play_and_learn_alike(
    ranks: RankPool, whole: Path, tmp_path: Path, layout: str, world: int, engine: int
) -> None:
    """The same rewards as in one process, the same losses, and weights by the metric of parity."""
    tree = config_to_tree(
        config(
            **places(
                tmp_path,
                {
                    "updates": 2,
                    "loss": {"kl_coefficient": 0.1},
                    "rollout": {"tp": engine},
                    "evaluate": {"tasks": 4},
                },
            )
        )
    )
    tree["parallel"] = config_to_tree(ParallelConfig.parse(layout))
    summaries = ranks.run(run_here, world, tree, timeout=120)
    assert [summary.rank for summary in summaries] == list(range(world))
    assert {summary.reward for summary in summaries} == {summaries[0].reward}
    for ours, theirs in zip(rows(tmp_path), rows(whole), strict=True):
        assert_close(ours, theirs)
    assert held_out(tmp_path) == held_out(whole)
    ours, theirs = tensors(tmp_path, 3), tensors(whole, 3)
    for name, value in theirs.items():
        if name.startswith("model/"):
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


OTHER_MODELS: dict[str, dict[str, Any]] = {
    "deep": {"num_layers": 4},
    "experts": {
        "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_size": 8, "aux_loss_coefficient": 0.01}
    },
}


@pytest.mark.parametrize(
    ("model", "layout", "world"),
    [
        ("deep", "pp=2,schedule=interleaved,chunks=2", 2),
        ("deep", "pp=2,schedule=zb-v,chunks=2", 2),
        ("experts", "dp=2,ep=2", 2),
    ],
)
def test_chunks_of_stages_and_experts(
    ranks: RankPool, tmp_path: Path, model: str, layout: str, world: int
) -> None:
    """Stages of several chunks, and experts cut over ranks: each engine has all of them."""
    sections = {
        "steps": 2,
        "model": OTHER_MODELS[model],
        "loss": {"kl_coefficient": 0.1},
        "rollout": {"max_sequences": 3},
    }
    run(tmp_path / "one", **sections)
    tree = config_to_tree(config(**places(tmp_path / "two", sections)))
    tree["parallel"] = config_to_tree(ParallelConfig.parse(layout))
    ranks.run(run_here, world, tree, timeout=120)
    expected = rows(tmp_path / "one")
    assert ("moe_balance_loss" in expected[0]) == (model == "experts")
    for ours, theirs in zip(rows(tmp_path / "two"), expected, strict=True):
        assert_close(ours, theirs)


def test_resume_under_another_layout(ranks: RankPool, whole: Path, tmp_path: Path) -> None:
    """One process, then two: the rest of the run is the same (U19)."""
    settings: dict[str, Any] = {"updates": 2, "loss": {"kl_coefficient": 0.1}}
    run(tmp_path, steps=1, **settings)
    tree = config_to_tree(config(**places(tmp_path, settings)))
    tree["parallel"] = config_to_tree(ParallelConfig.parse("tp=2"))
    assert ranks.run(run_here, 2, tree, timeout=120)[0].first_step == 1
    for ours, theirs in zip(rows(tmp_path), rows(whole), strict=True):
        assert_close(ours, theirs)


class StopAfterOne(Callback):
    """Asks to end as a signal handler does."""

    def on_step(self, trainer: Trainer, metrics: object) -> None:
        trainer.stop_requested = True


def test_a_request_to_stop_ends_after_the_step_in_flight(tmp_path: Path) -> None:
    """U22: the callback of mcore-train sets the same flag on SIGTERM."""
    settings = config(steps=50)
    mesh = ParallelMesh.single()
    source = Tasks(settings, TOKENIZER)
    session = build_session(settings.training(), mesh, data=source)
    engines = RolloutEngines(settings, session, TOKENIZER)
    step = PolicyStep(settings, session, engines, source)
    trainer = Trainer(session, [StopAfterOne()], step=step)
    trainer.run()
    assert trainer.step == 2  # asked during the first, which the second carries to all ranks
    assert trainer.progress.consumed == 32


def run_and_fail(tree: dict[str, Any]) -> str:
    with pytest.raises(EpisodeError) as caught:
        run_here(tree)
    return str(caught.value)


def test_a_failure_in_one_engine_is_raised_on_every_rank(ranks: RankPool) -> None:
    """Nobody waits for the rollouts of an engine that has none."""
    broken = {"name": "small_runs:Broken"}
    tree = config_to_tree(config(environment=broken, evaluate={"at_start": False}))
    tree["parallel"] = config_to_tree(ParallelConfig.parse("dp=2"))
    for said in ranks.run(run_and_fail, 2, tree):
        assert said.startswith("environment broken, task ")
        assert "reset raised ValueError: this task is broken" in said


def test_the_curve_of_no_step_is_no_picture(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "held_out_reward": 0.1}\n')
    plot_rewards(tmp_path / "metrics.jsonl", tmp_path / "reward.png")
    assert not (tmp_path / "reward.png").exists()
