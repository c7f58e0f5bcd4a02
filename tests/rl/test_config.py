"""What a run may be told: recipes that fit, mistakes that are named before anything is built."""

import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_rl import check_run, config_from_tree, load_config, recipe_names
from mcore_rl.load import RECIPES
from mcore_train import config_to_tree

sys.path.append(str(Path(__file__).parent))
from small_runs import config, tree

ROOT = Path(__file__).resolve().parents[2]


def test_recipes_load_by_name_and_from_the_clone() -> None:
    assert "rl_toy" in recipe_names()
    for name in recipe_names():
        assert (ROOT / "recipes" / f"{name}.yaml").read_text() == (
            RECIPES / f"{name}.yaml"
        ).read_text()
        loaded = load_config(ROOT / "recipes" / f"{name}.yaml")
        assert loaded == load_config(name)
        assert config_from_tree(config_to_tree(loaded)) == loaded


@pytest.mark.parametrize(("world", "overrides"), [(1, []), (2, []), (2, ["--parallel.tp", "2"])])
def test_recipes_fit(tmp_path: Path, world: int, overrides: list[str]) -> None:
    for name in recipe_names():
        folders = ["--checkpoint.directory", str(tmp_path), "--log.directory", str(tmp_path)]
        plan = check_run(load_config(name, [*overrides, *folders]), world)
        assert plan.micro_batches >= 1


def test_defaults_and_the_part_that_the_trainer_is_told() -> None:
    run = config_from_tree(
        {
            "steps": 2,
            "environment": {"name": "chain_sum"},
            "model": {"vocab_size": 257, "hidden_size": 16, "num_layers": 1, "num_heads": 2},
            "log": {"directory": "somewhere"},
        }
    )
    assert run.log.interval == 1  # every step is logged, also where the section is given
    assert (run.batch.global_size, run.batch.micro_size, run.tasks_per_step) == (64, 64, 8)
    assert run.rollout.log_probs == "processed"
    training = run.training()
    for name in ("model", "steps", "seed", "parallel", "batch", "optimizer", "schedule", "log"):
        assert getattr(training, name) == getattr(run, name)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"batch": {"global_size": 18}},
            "batch.global_size=18 is not a multiple of rollout.group_size=4: use global_size 16 or",
        ),
        ({"batch": {"global_size": 3}}, "use global_size 4"),
        ({"rollout": {"group_size": 1}}, "rollout: group_size=1: a rollout is compared"),
        ({"rollout": {"temperature": 0}}, "rollout: temperature=0.* must be greater than 0"),
        ({"rollout": {"top_p": 0}}, "rollout: top_p=0.* must lie in"),
        ({"rollout": {"max_tokens": 0}}, "rollout: max_tokens=0 must be at least 1"),
        ({"rollout": {"log_probs": "row"}}, "rollout.log_probs: .*'processed' or 'raw'"),
        ({"rollout": {"max_token": 3}}, "unknown key rollout.max_token: .* rollout.max_tokens"),
        ({"loss": {"clip_low": 2}}, "loss: clip_low=2.* must lie in"),
        ({"model": {"dropout": 0.1}}, "model.dropout=0.1: the policy that learns"),
        ({"updates": 0}, "updates=0 must be at least 1"),
        ({"evaluate": {"tasks": 0}}, "evaluate: tasks=0"),
        ({"data": {"mock": True}}, "unknown key data"),
        ({"advantages": "ppo"}, "advantages: .*'grpo'"),
    ],
)
def test_refusals(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        config(**sections)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "world", "message"),
    [
        (
            {"rollout": {"tp": 2}, "batch": {"global_size": 24}},
            3,
            "rollout.tp=2 does not divide the 3 processes",
        ),
        ({"rollout": {"tp": 4}, "batch": {"micro_size": 1}}, 4, "num_heads=2 cannot be cut"),
        ({"batch": {"micro_size": 16}}, 2, "batch.global_size=16 is not a multiple of"),
        ({"environment": {"name": "count_in"}}, 1, "did you mean 'count_on'"),
        ({"environment": {"name": "count_on", "options": {"digits": 0}}}, 1, "digits=0"),
        ({"environment": {"name": "count_on", "options": {"base": 11}}}, 1, "base=11 must lie"),
        (
            {"environment": {"name": "count_on", "options": {"terms": 2}}},
            1,
            "no option 'terms': did you",
        ),
        ({"environment": {"name": "no_such_module:X"}}, 1, "No module named 'no_such_module'"),
        ({"environment": {"name": "small_runs:Oddness"}}, 1, "small_runs has no class 'Oddness'"),
        ({"tokenizer": "nowhere"}, 1, "nowhere: no tokenizer"),
        ({"model": {"vocab_size": 200}}, 1, "model.vocab_size=200 is smaller than the 257 tokens"),
    ],
)
def test_what_does_not_fit_together(sections: dict[str, Any], world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_run(config(**sections), world)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"log\.directory=.* cannot be written"):
        check_run(config(log={"directory": str(tmp_path / "file" / "x")}), 1)


def test_unknown_recipe() -> None:
    with pytest.raises(ValueError, match="no recipe 'rl_toi': did you mean 'rl_toy'"):
        load_config("rl_toi")
    assert tree()["steps"] == 3


def test_rollouts_are_not_cut_over_context_parallel_ranks() -> None:
    with pytest.raises(ValueError, match=r"cp=2: rollouts are trained on whole.* use cp=1"):
        check_run(config(parallel={"cp": 2}), 2)
