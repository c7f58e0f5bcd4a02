import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_models import ModelConfig, MoEConfig
from mcore_train.config import TrainConfig
from mcore_train.load import (
    config_from_tree,
    config_to_tree,
    load_config,
    parse_overrides,
    recipe_names,
)

TOY: dict[str, Any] = {
    "steps": 10,
    "model": {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4},
    "data": {"mock": True, "seq_length": 16},
}


def test_yaml_overrides_and_defaults(tmp_path: Path) -> None:
    file = tmp_path / "toy.yaml"
    file.write_text(
        "steps: 10\nschedule: {lr: 1e-3, min_lr: 1e-4}\n"
        "model: {vocab_size: 64, hidden_size: 32, num_layers: 2, num_heads: 4}\n"
        "data: {mock: true}\n"
    )
    overrides = ["--model.num-layers", "6", "--schedule.lr=5e-3", "--checkpoint.directory", "ckpt"]
    config = load_config(file, [*overrides, "--optimizer.clip_norm", "null", "--parallel.tp=2"])
    assert (config.steps, config.model.num_layers, config.schedule.lr) == (10, 6, 5e-3)
    assert config.schedule.min_lr == 1e-4
    assert config.checkpoint.directory == Path("ckpt")
    assert config.optimizer.clip_norm is None
    assert config.parallel.tp == 2
    assert (
        config.optimizer.beta2
        == TrainConfig.__dataclass_fields__["optimizer"].default_factory().beta2
    )  # type: ignore[misc]


def test_a_config_survives_its_plain_form() -> None:
    for config in (config_from_tree(TOY), *(load_config(name) for name in recipe_names())):
        assert config_from_tree(config_to_tree(config)) == config


def test_a_preset_is_a_start(tmp_path: Path) -> None:
    tree = {"steps": 1, "model": {"preset": "llama-3-8b", "num_layers": 3}, "data": {"mock": True}}
    model = config_from_tree(tree).model
    assert (model.hidden_size, model.num_layers, model.vocab_size) == (4096, 3, 128256)


EXPERTS = {"num_experts": 8, "top_k": 2, "expert_ffn_size": 16}


def test_parts_are_configured_below_the_model(tmp_path: Path) -> None:
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump({**TOY, "model": {**TOY["model"], "moe": EXPERTS}}))
    config = load_config(file, ["--model.moe.top_k", "3", "--model.moe.aux_loss_coefficient=1e-3"])
    assert config.model.moe == MoEConfig(
        num_experts=8, top_k=3, expert_ffn_size=16, aux_loss_coefficient=1e-3
    )
    assert config_from_tree(config_to_tree(config)) == config
    assert load_config(file, ["--model.moe", "null"]).model.layer_pattern == ("*-", "*-")
    for override, message in {
        "--model.moe.topk=3": "unknown key model.moe.topk: did you mean model.moe.top_k?",
        "--model.moe.top_k=9": "model.moe: top_k=9 exceeds num_experts=8",
        "--model.pattern=*- *-": "model: moe is set and no layer",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            load_config(file, [override])


def test_one_field_of_a_part_of_a_preset_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(**TOY["model"], moe=MoEConfig(**EXPERTS))
    monkeypatch.setattr("mcore_train.load.preset", {"mine": model}.__getitem__)
    tree = {**TOY, "model": {"preset": "mine", "moe": {"top_k": 1, "normalise_top_k": False}}}
    moe = config_from_tree(tree).model.moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.expert_ffn_size) == (8, 1, 16)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--model.num_layer", "3"], "unknown key model.num_layer: did you mean model.num_layers?"),
        (["--sedd", "3"], "unknown key sedd: did you mean seed?"),
        (["--lr", "3"], "unknown key lr: did you mean schedule.lr?"),
        (["--optimizer.lr", "3"], "unknown key optimizer.lr: did you mean schedule.lr?"),
        (
            ["--micro-batch-size", "3"],
            "unknown key micro_batch_size: did you mean batch.micro_size?",
        ),
        (["--windows_", "3"], "unknown key windows_: did you mean evaluate.windows?"),
        (["--kind", "3"], "unknown key kind: did you mean optimizer.kind or schedule.kind?"),
        (
            ["--train-iters", "3"],
            "unknown key train_iters: known at the top are model, steps, seed",
        ),
        (["--optimizer.betas", "3"], "unknown key optimizer.betas: did you mean optimizer.beta"),
        (["--steps", "many"], "steps: input should be a valid integer.*got 'many'"),
        (["--schedule.kind", "cosin"], "schedule.kind: input should be 'cosine'"),
        (["--steps.x", "1"], "steps has no fields"),
        (["--steps"], "--steps needs a value"),
        (["steps"], "unexpected argument 'steps'"),
        (["--steps", "0"], "steps=0 must be at least 1"),
        (["--model.num_heads", "5"], "model: hidden_size=32.*num_heads=5"),
        (["--model.preset", "llama-3-80b"], "did you mean 'llama-3-8b'"),
        (["--schedule.warmup_steps", "11"], "warmup_steps=11 exceeds steps=10: use 10 or less"),
        (["--schedule.min_lr", "1"], "min_lr=1.0 must lie in 0 <= min_lr <= lr"),
        (["--checkpoint.interval", "5"], "interval=5 needs checkpoint.directory"),
        (
            ["--data.mock", "false", "--data.reset_attention", "true"],
            "reset_attention: .* need eod_id or a tokenizer",
        ),
    ],
)
def test_wrong_input_is_one_clear_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_config(TOY, overrides)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    for name, message in (
        ("list.yaml", "is a mapping, not list"),
        ("bad.yaml", "not YAML"),
        ("missing.yaml", "no such file"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            load_config(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="did you mean 'quickstart'"):
        load_config("quikstart")


def test_override_values_are_yaml() -> None:
    parsed = parse_overrides(["--a.b=1e-3", "--c", "[1, 2]", "--d", "null", "--e=x=y", "--f", "-3"])
    assert parsed == [
        (["a", "b"], 1e-3),
        (["c"], [1, 2]),
        (["d"], None),
        (["e"], "x=y"),
        (["f"], -3),
    ]


def test_the_plain_config_is_not_changed() -> None:
    load_config(TOY, ["--model.num_layers", "7"])
    assert TOY["model"]["num_layers"] == 2  # type: ignore[index]
