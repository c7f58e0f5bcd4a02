"""Training of adapters: every layout, from weights elsewhere, on and on, and out again."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.convert import convert
from mcore_models import GPT, ModelConfig, build_model
from mcore_models.adapters import LoRAConfig, adapter_tensors, add_lora
from mcore_parallel import ParallelConfig, ParallelMesh
from mcore_parallel.testing import RankPool
from mcore_train import pretrain
from mcore_train.adapters import load_peft, merge_run, open_run, save_peft
from mcore_train.cli import main
from mcore_train.config import TrainConfig
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.parity import compare, record, record_rank

STEPS = 3
TREE = {
    "model": {
        "vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
        "ffn_size": 48, "init_std": 0.1,
    },
    "steps": STEPS,
    "data": {"mock": True, "seq_length": 16},
    "batch": {"global_size": 4, "micro_size": 1},
    "optimizer": {"eps": 1e-3},
    "schedule": {"lr": 0.02},
    "log": {"progress": False, "tensorboard": False},
    "lora": {"rank": 3, "dropout": 0.2},
}  # fmt: skip


def config_of(**fields: object) -> TrainConfig:
    return config_from_tree({**TREE, **fields})


@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, "tp=2,sp"), (2, "pp=2"), (2, "cp=2"), (2, "dp=2,zero=1"), (2, "dp=2,zero=3")],
)
def test_layouts_equal_one_process(ranks: RankPool, world: int, layout: str) -> None:
    """Loss, gradients and parameters of adapters with dropout; nothing else has a gradient."""
    config = config_of()
    single = record(config, ParallelMesh.single(), STEPS)
    other = dataclasses.replace(config, parallel=ParallelConfig.parse(layout))
    found = ranks.run(record_rank, world, config_to_tree(other), STEPS, timeout=200)[0]
    assert single is not None
    assert found is not None
    assert all(".lora_" in name for name in single.gradients)
    report = compare(single, found, layout=layout, world_size=world)
    assert report.holds, report.first_failure()


def test_experts_of_two_ranks(ranks: RankPool) -> None:
    moe = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 16}
    model = {**TREE["model"], "moe": moe, "pattern": ["*E", "*E"]}  # type: ignore[dict-item]
    config = config_of(model=model, lora={"rank": 3, "targets": ["*.experts.*", "*.attention.*"]})
    single = record(config, ParallelMesh.single(), STEPS)
    other = dataclasses.replace(config, parallel=ParallelConfig.parse("dp=2,ep=2"))
    found = ranks.run(record_rank, 2, config_to_tree(other), STEPS, timeout=200)[0]
    assert single is not None
    assert found is not None
    assert "layers.0.moe.experts.gate.lora_b.weight" in single.gradients
    report = compare(single, found, layout="ep=2", world_size=2)
    assert report.holds, report.first_failure()


ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {
        "norm": "layer_norm", "norm_place": "sum", "activation": "gelu", "position": "learned",
        "max_positions": 16, "linear_bias": True, "tied_embeddings": True,
        "attention": {"causal": False}, "bert": {},
    },
    "t5": {
        "position": "none", "tied_embeddings": True, "activation": "relu",
        "attention": {"scale": 1.0}, "t5": {"num_buckets": 8, "max_distance": 10},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("bert", {"rank": 3, "dropout": 0.2}),
        ("t5", {"rank": 3, "targets": ["encoder.layers.*", "decoder.layers.*"]}),
    ],
)
def test_encoders_over_two_ranks(ranks: RankPool, family: str, lora: dict[str, object]) -> None:
    """Also what reads another sequence: adapters of cross-attention."""
    model = {**TREE["model"], "num_kv_heads": 4, **ENCODERS[family]}  # type: ignore[dict-item]
    config = config_of(model=model, lora=lora, batch={"global_size": 2, "micro_size": 2})
    single = record(config, ParallelMesh.single(), STEPS)
    other = dataclasses.replace(config, parallel=ParallelConfig.parse("tp=2,sp"))
    found = ranks.run(record_rank, 2, config_to_tree(other), STEPS, timeout=200)[0]
    assert single is not None
    assert found is not None
    assert ("decoder.layers.0.cross_attention.k.lora_a.weight" in single.gradients) == (
        family == "t5"
    )
    report = compare(single, found, layout="tp=2,sp", world_size=2)
    assert report.holds, report.first_failure()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run without adapters, and one that begins with its weights and trains adapters."""
    base, run = (tmp_path_factory.mktemp("runs") / name for name in ("base", "run"))
    pretrain(config_of(lora=None, checkpoint={"directory": str(base)}))
    start = {"directory": str(run), "load": str(base), "weights_only": True}
    pretrain(config_of(checkpoint=start))
    return base, run


def open_plain(run: Path, mesh: ParallelMesh | None = None) -> GPT:
    checkpoint = mcore_ckpt.open(run)
    model = build_model(ModelConfig(**checkpoint.state["config"]["model"]), mesh, key=None)
    for name, parameter in model.named_parameters():
        for fragment, view in model.specs()[name].layout.views(parameter.detach()):
            view.copy_(checkpoint[f"model/{fragment.name}"][fragment.box.slices])
    return model


def test_adapters_learn_and_the_weights_stay(runs: tuple[Path, Path]) -> None:
    base, run = (mcore_ckpt.open(path) for path in runs)
    weights = [name for name in run if name.startswith("model/")]
    new = [name for name in weights if ".lora_" in name]
    assert {*weights} - {*new} == {name for name in base if name.startswith("model/")}
    for name in weights:
        if name in new:
            assert run[name].abs().max() > 0, name
            assert f"exp_avg/{name.removeprefix('model/')}" in run
        else:
            assert torch.equal(run[name], base[name]), name
    assert len(new) == 2 * 2 * 7


def test_a_run_goes_on_with_the_adapters_it_had(runs: tuple[Path, Path], tmp_path: Path) -> None:
    base, run = runs
    summary = pretrain(
        config_of(steps=4, checkpoint={"directory": str(tmp_path), "load": str(run)})
    )
    assert (summary.first_step, summary.step) == (3, 4)
    cases = [
        (run, {"rank": 3, "alpha": 8.0}, r"lora\.alpha=8\.0, but .* was trained with 16\.0"),
        (run, None, r"was trained with adapters \(lora\.rank=3\)"),
        (base, {"rank": 3}, "was trained without adapters: .*weights_only"),
    ]
    for place, lora, message in cases:
        with pytest.raises(ValueError, match=message):
            pretrain(config_of(lora=lora, steps=5, checkpoint={"load": str(place)}))


def test_adapters_are_saved_and_loaded_alone(runs: tuple[Path, Path], tmp_path: Path) -> None:
    model, _ = open_run(runs[1])
    mcore_ckpt.save(tmp_path, step=1, tensors=adapter_tensors(model))
    assert all(".lora_" in name for name in mcore_ckpt.open(tmp_path))
    other = open_plain(runs[0]).eval()
    add_lora(other, LoRAConfig(rank=3))
    mcore_ckpt.load(tmp_path, adapter_tensors(other))
    tokens = torch.arange(12)[None]
    assert torch.equal(other(tokens), model(tokens))


def test_a_merged_run_is_one_without_adapters(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder for transformers, too, has what the adapters make of the weights."""
    assert main(["merge", str(runs[1]), "--to", str(tmp_path / "merged")]) == 0
    assert "merged weights in" in capsys.readouterr().out
    model, _ = open_run(runs[1])
    tokens = torch.arange(12)[None]
    plain = open_plain(tmp_path / "merged")
    assert (plain(tokens) - model(tokens)).norm() <= 1e-5 * model(tokens).norm()
    convert(("native", tmp_path / "merged"), ("hf", tmp_path / "hf"))
    with pytest.raises(ValueError, match="lora_a"):  # and not half of a model
        convert(("native", runs[1]), ("hf", tmp_path / "wrong"))
    with pytest.raises(ValueError, match="has no adapters"):
        merge_run(runs[0], tmp_path / "again")
    assert main(["merge", str(runs[1]), "--to", str(tmp_path / "merged")]) == 2


def load_and_save(base: Path, folder: Path, to: Path, layout: str) -> None:
    mesh = ParallelMesh.create(ParallelConfig.parse(layout))
    assert mesh is not None
    model = open_plain(base, mesh)
    load_peft(folder, model)
    save_peft(to, model)
    mesh.close()


@pytest.mark.parametrize("layout", ["tp=2", "pp=2"])
def test_peft_folders_are_read_and_written_in_any_layout(
    ranks: RankPool, runs: tuple[Path, Path], tmp_path: Path, layout: str
) -> None:
    first = save_peft(tmp_path / "first", open_run(runs[1])[0])
    ranks.run(load_and_save, 2, runs[0], first, tmp_path / "second", layout)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        one, two = ((tmp_path / x / file).read_bytes() for x in ("first", "second"))
        if file.endswith("json"):  # of one order of layers whatever the layout
            assert sorted(json.loads(one)["target_modules"]) == sorted(
                json.loads(two)["target_modules"]
            )
        else:
            assert one == two


def test_peft_folders_come_back(runs: tuple[Path, Path], tmp_path: Path) -> None:
    model, _ = open_run(runs[1])
    folder = save_peft(tmp_path / "peft", model, base="somewhere/base")
    tree = json.loads((folder / "adapter_config.json").read_text())
    assert (tree["peft_type"], tree["r"], tree["lora_alpha"]) == ("LORA", 3, 16)
    assert tree["base_model_name_or_path"] == "somewhere/base"
    assert "model.layers.1.mlp.gate_proj" in tree["target_modules"]
    assert len(tree["target_modules"]) == 14
    other = open_plain(runs[0])
    assert load_peft(folder, other).scale == 16 / 3
    tokens = torch.arange(12)[None]
    assert torch.equal(other.eval()(tokens), model(tokens))
    for edit, message in (
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
    ):
        (folder / "adapter_config.json").write_text(json.dumps({**tree, **edit}))
        with pytest.raises(ValueError, match=message):
            load_peft(folder, open_plain(runs[0]))
