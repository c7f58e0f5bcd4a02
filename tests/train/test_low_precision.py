"""Training with linear layers in few bits: near whole products, resumed exactly, in layouts."""

import dataclasses
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_ckpt
from mcore_kernels.ops.linear.fp8 import Fp8Linear
from mcore_parallel import ParallelConfig, ParallelMesh
from mcore_parallel.testing import RankPool
from mcore_train.bench import BenchOptions, bench
from mcore_train.bench.config import bench_config
from mcore_train.bench.text import describe
from mcore_train.callbacks import read_metrics
from mcore_train.config import TrainConfig
from mcore_train.load import config_to_tree, load_config
from mcore_train.parity import Record, record, record_rank
from mcore_train.pretrain import pretrain, run_rank
from mcore_train.session import build_session
from mcore_train.step import Step

sys.path.append(str(Path(__file__).parent))
from toy import toy, toy_tree

NEAR = 2e-3
"""How far a loss of about 4 may be from that of products in fp32, and from another layout's."""
DELAYED = {"recipe": {"history": 2}}


def config_of(low: dict[str, Any] | None, folder: Path | None = None, **fields: Any) -> TrainConfig:
    model = {"num_layers": 2, **fields.pop("model", {})}
    return toy(
        model=model,
        low_precision=low,
        schedule={"lr": 2e-3, "decay_steps": 5},
        checkpoint={"directory": None if folder is None else str(folder)},
        log={"directory": None if folder is None else str(folder)},
        evaluate={"interval": 2},
        **fields,
    )


def losses(config: TrainConfig, steps: int = 4, device: str = "cpu") -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of one process."""
    session = build_session(config, ParallelMesh.single(device))
    step, batches = Step(session), session.data.batches()
    found = [step(next(batches), lr=2e-3, rng=session.rng.next("dropout")) for _ in range(steps)]
    session.close()
    return [(one.loss, one.grad_norm) for one in found]


def rows(folder: Path) -> list[tuple[float, ...]]:
    """Everything that was measured, by step."""
    found = read_metrics(folder / "metrics.jsonl")
    kinds = ("step", "loss", "grad_norm", "validation_loss")
    return [tuple(row.get(k, 0.0) for k in kinds) for row in found if "loss" in "".join(row)]


@pytest.fixture(scope="module")
def exact() -> list[tuple[float, float]]:
    return losses(config_of(None))


@pytest.mark.parametrize(
    "low",
    [
        {},
        DELAYED,
        {"recipe": {"scaling": "row"}},
        {"recipe": {"scaling": "block", "grad_format": "e4m3"}, "first": 1},
        {"microscaling": {"format": "mxfp8"}, "keep": ["*.mlp.*"]},
    ],
    ids=["tensor", "delayed", "row", "block", "mxfp8"],
)
def test_losses_are_near_those_of_whole_products(
    low: dict[str, Any], exact: list[tuple[float, float]]
) -> None:
    """Within 0.05% of the loss, and 10% of the norm of the gradient; and not the same."""
    found = losses(config_of(low))
    for (loss, norm), (other, other_norm) in zip(found, exact, strict=True):
        assert loss == pytest.approx(other, abs=NEAR)
        assert norm == pytest.approx(other_norm, rel=0.1)
    assert found != exact


EXPERTS: dict[str, Any] = {
    "pattern": ["*E", "*-"],
    "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_size": 16},
}


def test_experts_are_near_those_of_whole_products_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    """Computed again or not; a history of each expert is in the checkpoint."""
    low = {"recipe": {"history": 2}, "modules": ["*.experts.*"]}
    exact, found = (losses(config_of(one, model=EXPERTS), steps=3) for one in (None, low))
    for (loss, norm), (other, other_norm) in zip(found, exact, strict=True):
        assert loss == pytest.approx(other, abs=NEAR)
        assert norm == pytest.approx(other_norm, rel=0.1)
    assert found != exact
    again = config_of(low, model=EXPERTS, recompute={"mode": "full"})
    assert losses(again, steps=3) == found
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pretrain(config_of(low, whole, model=EXPERTS, steps=3))
    pretrain(config_of(low, parts, model=EXPERTS, steps=2))
    assert pretrain(config_of(low, parts, model=EXPERTS, steps=3)).first_step == 2
    ours, theirs = mcore_ckpt.open(parts), mcore_ckpt.open(whole)
    assert list(ours) == list(theirs)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    assert ours["extra/layers.0.moe.experts.down.scales/history"].shape == (3, 4, 3)


@pytest.mark.parametrize("layout", ["ep=2,zero=1", "pp=2,schedule=zb-h1"])
def test_layouts_of_experts(ranks: RankPool, layout: str) -> None:
    """Losses and gradients near those of one process, and the same on all ranks."""
    low = {"modules": ["*.experts.*"]}
    config = config_of(low, batch={"global_size": 4, "micro_size": 1}, model=EXPERTS)
    compare_with_one(ranks, config, layout, steps=2)


def test_what_is_computed_again_is_the_same() -> None:
    """Bit for bit: histories do not learn twice from one pass."""
    again = losses(config_of(DELAYED, recompute={"mode": "full"}))
    assert again == losses(config_of(DELAYED))


def test_a_weight_is_quantised_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each of its micro-batches, passes and evaluations."""
    seen: Counter[str] = Counter()
    encode = Fp8Linear._encode

    def counting(op: Fp8Linear, role: str, x: Tensor, *args: Any, **options: Any) -> Any:
        seen[role] += 1
        return encode(op, role, x, *args, **options)

    monkeypatch.setattr(Fp8Linear, "_encode", counting)
    losses(config_of({}), steps=3)
    layers, micro_batches = 8, 2
    assert seen == {
        "input": 3 * layers * micro_batches,
        "grad": 3 * layers * micro_batches,
        "weight": 3 * layers,
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    pretrain(config_of(DELAYED, folder, steps=5))
    return folder


def test_a_run_goes_on_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    """Histories are in the checkpoint; what is kept of weights is not."""
    pretrain(config_of(DELAYED, tmp_path, steps=2))
    assert pretrain(config_of(DELAYED, tmp_path, steps=5)).first_step == 2
    assert rows(tmp_path) == rows(whole)
    ours, theirs = mcore_ckpt.open(tmp_path), mcore_ckpt.open(whole)
    assert list(ours) == list(theirs)
    histories = [name for name in ours if name.startswith("extra/")]
    assert "extra/layers.1.attention.qkv.scales/history" in histories
    assert len(histories) == 8
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    history = theirs["extra/layers.0.mlp.down.scales/history"]
    assert history.shape == (3, 3)
    assert not history[::2, 0].any()  # the last evaluation has seen the weight alone
    assert (history[:, 1:] > 0).all()


def test_eight_bits_begin_in_a_run_that_had_none(tmp_path: Path) -> None:
    """Without a history at any step; with one when it is said that it may begin afresh."""
    pretrain(config_of(None, tmp_path, steps=2))
    assert pretrain(config_of({}, tmp_path, steps=3)).first_step == 2
    delayed = config_of(DELAYED, tmp_path, steps=4)
    with pytest.raises(ValueError, match=r"extra/layers\.0\.attention\.o\.scales/history"):
        pretrain(delayed)
    checkpoint = dataclasses.replace(delayed.checkpoint, strict="warn")
    with pytest.warns(RuntimeWarning, match=r"scales/history"):
        summary = pretrain(dataclasses.replace(delayed, checkpoint=checkpoint))
    assert (summary.first_step, summary.step) == (3, 4)


@pytest.mark.parametrize("layout", ["pp=2", "dp=2,zero=1"])
def test_histories_go_on_in_another_layout(
    ranks: RankPool, whole: Path, tmp_path: Path, layout: str
) -> None:
    pretrain(config_of(DELAYED, tmp_path, steps=2))
    config = config_of(DELAYED, tmp_path, steps=5)
    config = dataclasses.replace(config, parallel=ParallelConfig.parse(layout))
    ranks.run(run_rank, 2, config_to_tree(config), timeout=300)
    for ours, theirs in zip(rows(tmp_path), rows(whole), strict=True):
        assert ours == pytest.approx(theirs, rel=NEAR)
    ours, theirs = mcore_ckpt.open(tmp_path), mcore_ckpt.open(whole)
    for name in (name for name in theirs if name.startswith("extra/")):
        # In another order of sums now and then a number is rounded to its other neighbour.
        torch.testing.assert_close(ours[name], theirs[name], rtol=0.02, atol=1e-6)


@pytest.mark.parametrize(
    "layout",
    ["tp=2,sp", "pp=2,schedule=zb-h1", "cp=2", "dp=2,zero=2", "dp=2,zero=3"],
)
def test_layouts(ranks: RankPool, layout: str) -> None:
    """Losses and gradients near those of one process, and the same on all ranks."""
    config = config_of({}, batch={"global_size": 4, "micro_size": 1})
    compare_with_one(ranks, config, layout, steps=3)


def compare_with_one(ranks: RankPool, config: TrainConfig, layout: str, *, steps: int) -> None:
    other = dataclasses.replace(config, parallel=ParallelConfig.parse(layout))
    alone = record(config, ParallelMesh.single(), steps)
    found = ranks.run(record_rank, 2, config_to_tree(other), steps, timeout=300)[0]
    assert isinstance(alone, Record)
    assert isinstance(found, Record)
    assert found.diverged == ()
    assert found.losses == pytest.approx(alone.losses, abs=NEAR)
    size = max(float(gradient.norm()) for gradient in alone.gradients.values())
    for name, gradient in alone.gradients.items():
        assert float((found.gradients[name] - gradient).norm()) < 0.05 * size, name


def test_options_that_cannot_be() -> None:
    for low, message in (
        ({"recipe": {"scalin": "row"}}, "unknown key low_precision.recipe.scalin: did you mean"),
        ({"recipe": {"scaling": "rows"}}, "recipe: no scaling 'rows'; did you mean 'row'?"),
        ({"modules": []}, "low_precision.modules is empty"),
        ({"first": -1}, "low_precision.first=-1 must be at least 0"),
        ({"first": 3, "last": 1}, "keep all of the 4 layers: together at most 3"),
        ({"recipe": {"margin": 1}, "microscaling": {}}, "low_precision.recipe would not be used"),
    ):
        with pytest.raises(ValueError) as error:
            load_config(toy_tree(low_precision=low))
        assert message in str(error.value)
        assert "\n" not in str(error.value)


def test_rules_that_leave_nothing_are_refused_in_one_line() -> None:
    config = config_of({"keep": ["*"]})
    with pytest.raises(
        ValueError, match=r"^low_precision: keep=\['\*'\], .* leave no linear layer"
    ):
        build_session(config, ParallelMesh.single())


def test_the_last_layers_take_the_depths_of_prediction_with_them() -> None:
    low = {"last": 1, "modules": ["*.mlp.*"]}
    session = build_session(config_of(low, model={"mtp": {"num_depths": 1}}), ParallelMesh.single())
    found = {
        n for n, m in session.model.named_modules() if hasattr(getattr(m, "linear", 0), "encode")
    }
    session.close()
    assert found == {"layers.0.mlp.gate_up", "layers.0.mlp.down"}


def test_options_of_the_command_line() -> None:
    config = bench_config(
        "llama3-8b-8layers",
        precision="fp8",
        overrides=["--low_precision.recipe.scaling=block", "--low_precision.keep", "*.attention.*"],
    )
    assert config.precision == "bf16"
    assert config.low_precision is not None
    assert config.low_precision.recipe.scaling == "block"
    assert config.low_precision.keep == ("*.attention.*",)


def test_how_many_layers_multiply_in_what_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "linear layers: 4 in e4m3/e5m2 (scales of tensors), 4 in float32"
    config = config_of({"keep": ["*.attention.*"]})
    report = bench(config, BenchOptions(warmup=0, steps=1, split=False))
    assert describe(report)[1] == line
    assert report.row()["low_precision"] == line
    progress = dataclasses.replace(config.log, progress=True)
    pretrain(dataclasses.replace(config, log=progress, steps=2))
    assert line in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"grad_format": "e4m3"},
        {"history": 2},
        {"scaling": "row"},
        {"scaling": "block"},
        {"scaling": "block", "grad_format": "e4m3"},
    ],
    ids=lambda recipe: "-".join(map(str, recipe.values())) or "tensor",
)
def test_on_a_gpu(recipe: dict[str, Any]) -> None:
    """Products of the device are those of the emulation, and near those of 16 bits."""
    found = []
    for low in ({"recipe": recipe}, {"recipe": recipe, "emulate": True}, None):
        config = config_of(
            low,
            model={"hidden_size": 256, "ffn_size": 384},
            data={"seq_length": 128},
            precision="bf16",
            device="cuda",
        )
        found.append(losses(config, device="cuda"))
    for ours, emulated, exact in zip(*found, strict=True):
        assert ours[0] == pytest.approx(emulated[0], abs=5e-3)
        assert ours[1] == pytest.approx(emulated[1], rel=0.05)
        assert ours[0] == pytest.approx(exact[0], abs=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scaling", ["tensor", "block"])
def test_experts_on_a_gpu(scaling: str) -> None:
    """Products of the device are those of the emulation, and near those of 16 bits."""
    found = []
    model = {"hidden_size": 256, "ffn_size": 384, **EXPERTS}
    model["moe"] = {**EXPERTS["moe"], "expert_ffn_size": 128}
    recipe = {"scaling": scaling}
    for low in ({"recipe": recipe}, {"recipe": recipe, "emulate": True}, None):
        config = config_of(
            low, model=model, data={"seq_length": 128}, precision="bf16", device="cuda"
        )
        found.append(losses(config, device="cuda"))
    for ours, emulated, exact in zip(*found, strict=True):
        assert ours[0] == pytest.approx(emulated[0], abs=5e-3)
        assert ours[0] == pytest.approx(exact[0], abs=0.02)
