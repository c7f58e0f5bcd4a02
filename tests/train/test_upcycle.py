"""A dense model becomes one with experts that computes the same, and trains on."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.convert import convert
from mcore_models import GPT, ModelConfig, MoEConfig, build_model, gpt2, llama
from mcore_models.upcycling import Upcycling, upcycled_config
from mcore_parallel.layout import LayoutTensor
from mcore_train import pretrain
from mcore_train.cli import main
from mcore_train.load import config_from_tree
from mcore_train.upcycle import upcycle

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
LLAMA = llama(**SIZES, ffn_size=48)
MOE = {"num_experts": 4, "top_k": 2}
TOKENS = torch.arange(24).reshape(2, 12)


def tree_of(model: dict[str, object], **fields: object) -> dict[str, object]:
    return {
        "model": model, "steps": 2, "data": {"mock": True, "seq_length": 16},
        "batch": {"global_size": 2, "micro_size": 1},
        "log": {"progress": False, "tensorboard": False}, **fields,
    }  # fmt: skip


def opened(run: Path) -> GPT:
    checkpoint = mcore_ckpt.open(run)
    model = build_model(ModelConfig(**checkpoint.state["config"]["model"]), key=None)
    specs, parameters = model.specs(), dict(model.named_parameters())
    tensors = {
        name: LayoutTensor(parameters[name].detach(), spec.layout.renamed("model/".__add__))
        for name, spec in specs.items()
    }
    mcore_ckpt.load(checkpoint.path, tensors, prefixes=["model/"])
    return model.eval()


@pytest.mark.parametrize(
    ("dense", "moe"),
    [
        (LLAMA, MoEConfig(num_experts=4, top_k=2, expert_ffn_size=48)),
        (LLAMA, MoEConfig(num_experts=4, top_k=3, expert_ffn_size=48, score_function="sigmoid")),
        (
            replace(gpt2(**SIZES, ffn_size=40), dropout=0.0, max_positions=32),
            MoEConfig(num_experts=3, top_k=2, expert_ffn_size=40, correction_rate=0.1),
        ),
    ],
    ids=["softmax", "sigmoid", "biases"],
)
@pytest.mark.parametrize("layers", [None, [1]])
def test_experts_that_are_the_mlp_compute_the_same(
    dense: ModelConfig, moe: MoEConfig, layers: list[int] | None
) -> None:
    before = build_model(dense).eval()
    for parameter in before.parameters():  # biases, too, matter
        with torch.no_grad():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    specs, tensors = before.specs(), {}
    for name, parameter in before.named_parameters():
        tensors |= {f.name: view for f, view in specs[name].layout.views(parameter.detach())}
    sparse = upcycled_config(dense, moe, layers)
    assert sparse.layers_with("E") == ((0, 1) if layers is None else (1,))
    plan = Upcycling(dense=dense, sparse=sparse)
    after = build_model(sparse, key=None).eval()
    for name, parameter in after.named_parameters():
        for f, view in after.specs()[name].layout.views(parameter.detach()):
            view.copy_(plan.tensor(f.name, tensors.__getitem__))
    assert after.get_parameter("layers.1.moe.router.weight").abs().min() > 0
    want, found = before(TOKENS), after(TOKENS)
    assert (found - want).norm() <= 1e-6 * want.norm()


def test_a_run_and_a_folder_become_runs_with_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = tmp_path / "dense", tmp_path / "hf"
    model = {**SIZES, "ffn_size": 48, "num_kv_heads": 2}
    pretrain(config_from_tree(tree_of(model, checkpoint={"directory": str(run)})))
    convert(("native", run), ("hf", folder))
    want = opened(run)(TOKENS)
    command = ["--moe.num_experts", "4", "--moe.top_k=2", "--layers", "1"]
    for source in (run, folder):
        to = tmp_path / f"from-{source.name}"
        assert main(["upcycle", str(source), "--to", str(to), *command]) == 0
        assert "model with experts in" in capsys.readouterr().out
        assert (opened(to)(TOKENS) - want).norm() <= 1e-6 * want.norm()
    moe = {**MOE, "expert_ffn_size": 48}
    sparse = {**model, "pattern": ["*-", "*E"], "moe": moe}
    to = tmp_path / "from-dense"
    start = {"load": str(to), "weights_only": True, "directory": str(tmp_path / "on")}
    assert pretrain(config_from_tree(tree_of(sparse, checkpoint=start))).step == 2
    assert main(["upcycle", str(run), "--to", str(to), *command]) == 2  # not over what is there
    assert main(["upcycle", str(run), "--to", str(tmp_path / "x"), "--moe.top_k", "2"]) == 2
    assert main(["upcycle", str(run), "--to", str(tmp_path / "x"), "--steps", "2"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert [len(errors), "--moe.num_experts is missing" in errors[1]] == [3, True]
    with pytest.raises(ValueError, match=r"no field 'topk': did you mean 'top_k'"):
        upcycle(run, tmp_path / "x", {**MOE, "topk": 2})
    with pytest.raises(ValueError, match="has experts already"):
        upcycle(to, tmp_path / "x", MOE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert_ffn_size": 24}, "need expert_ffn_size=48"),
        ({"normalise_top_k": False}, "need normalise_top_k=True"),
        ({"scaling_factor": 2.5}, "need scaling_factor=1.0"),
        ({"shared_ffn_size": 16}, "need shared_ffn_size=0"),
        ({"expert_bias": True}, "the MLP has False"),
    ],
)
def test_what_would_compute_something_else_is_refused(
    fields: dict[str, object], message: str
) -> None:
    moe = MoEConfig(**{**MOE, "expert_ffn_size": 48, **fields})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        upcycled_config(LLAMA, moe)
    with pytest.raises(ValueError, match="layer 2 has no MLP"):
        upcycled_config(LLAMA, replace(moe, expert_ffn_size=48), [2])
