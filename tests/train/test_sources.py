"""Blends in training: which samples, in which proportion, and what of them is resumed."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt
from mcore_data import BlendedDataset, BlendSampler, GPTDataset, IndexedReader, JoinedDataset
from mcore_parallel import ParallelConfig
from mcore_parallel.testing import RankPool
from mcore_train.callbacks import read_metrics
from mcore_train.cli import main
from mcore_train.config import TrainConfig
from mcore_train.data_config import DataConfig
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.pretrain import pretrain, run_rank
from mcore_train.sources import open_datasets

sys.path.append(str(Path(__file__).parent))
from toy import toy, toy_tree, write_tokens

SMALL = {"num_layers": 1, "hidden_size": 16, "ffn_size": 16}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("blend")
    sizes = {"code": 40, "web": 70, "short": 10}
    return {
        name: str(write_tokens(folder / name, documents=size, seed=size))
        for name, size in sizes.items()
    }


def blended(data: dict[str, Any], **fields: Any) -> TrainConfig:
    data = {"mock": False, "seq_length": 8, **data}
    batch = {"global_size": 4, "micro_size": 1}
    return toy(**{"model": SMALL, "data": data, "batch": batch, **fields})


def mixture(files: dict[str, str], *weights: float) -> list[str | float]:
    names = ("code", "web", "short")
    return [x for name, weight in zip(names, weights, strict=False) for x in (weight, files[name])]


def training_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


def test_a_blend_is_resumed_under_another_dp_and_with_other_weights(
    ranks: RankPool, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """U10 and U19: the counters of every source go on, and so does the loss."""

    def config(folder: Path, steps: int, *weights: float) -> TrainConfig:
        return blended(
            {"blend": mixture(files, *weights), "split": "8,2"},
            steps=steps,
            schedule={"decay_steps": 5},
            checkpoint={"directory": str(folder)},
            log={"directory": str(folder)},
        )

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pretrain(config(whole, 6, 1, 3), nproc=1)
    other = dataclasses.replace(config(parts, 3, 1, 3), parallel=ParallelConfig.parse("dp=2"))
    ranks.run(run_rank, 2, config_to_tree(other), timeout=60)
    path = tmp_path / "config.json.yaml"
    path.write_text(json.dumps(config_to_tree(config(parts, 6, 1, 3))))
    assert main(["pretrain", "--config", str(path), "--nproc", "1"]) == 0
    assert "from step 3 to step 6" in capsys.readouterr().out
    for ours, theirs in zip(training_rows(parts), training_rows(whole), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["samples/code"] == theirs["samples/code"] == ours["step"]
        assert ours["samples/web"] == theirs["samples/web"] == 3 * ours["step"]
    states = [mcore_ckpt.read_state(folder)["data"] for folder in (whole, parts)]
    assert states[0] == states[1]
    assert states[0]["sources"]["web"] == {"weight": 0.75, "consumed": 18, "since_change": 18}

    pretrain(config(parts, 8, 1, 0, 1), nproc=1)
    sources = mcore_ckpt.read_state(parts)["data"]["sources"]
    assert {name: row["consumed"] for name, row in sources.items()} == {
        "code": 6 + 4,
        "web": 18,
        "short": 4,
    }
    assert sources["short"]["since_change"] == 4


def test_validation_sets_by_name(files: dict[str, str], tmp_path: Path) -> None:
    """Each has its loss, `validation` is their mean, and the run ends with that."""
    parts = tmp_path / "parts.json"
    parts.write_text(
        json.dumps(
            {
                "train": [2, files["code"], 1, files["short"]],
                "valid": {"web": [files["web"]], "both": [1, files["code"], 2, files["web"]]},
            }
        )
    )
    config = blended({"parts": str(parts)}, steps=2, log={"directory": str(tmp_path)})
    summary = pretrain(config, nproc=1)
    losses: dict[str, float] = {}
    for row in read_metrics(tmp_path / "metrics.jsonl"):
        losses |= {key: value for key, value in row.items() if key.startswith("validation")}
    assert sorted(losses) == ["validation/both_loss", "validation/web_loss", "validation_loss"]
    mean = (losses["validation/both_loss"] + losses["validation/web_loss"]) / 2
    assert losses["validation_loss"] == summary.validation_loss == pytest.approx(mean)
    both = open_datasets(config).validation["both"]
    assert isinstance(both, BlendedDataset)
    assert both.count(range(5)).tolist() == [2, 3]


def test_what_is_opened(files: dict[str, str], tmp_path: Path) -> None:
    names = [files["code"], files["web"]]
    single = open_datasets(blended({"train": files["code"], "split": "9,1"}))
    assert isinstance(single.train, GPTDataset)
    once = open_datasets(blended({"blend": names, "validation": files["short"]}))
    assert isinstance(once.train, JoinedDataset)
    assert isinstance(once.sampler, BlendSampler)
    lengths = [len(GPTDataset(IndexedReader(name), seq_length=8)) for name in names]
    assert list(once.sampler.lengths.values()) == lengths
    assert sorted(once.sampler.take(0, sum(lengths)).tolist()) == list(range(sum(lengths)))
    assert isinstance(once.validation["validation"], GPTDataset)
    each = open_datasets(blended({"blend": names, "split": "5,5", "each_validation": True}))
    assert list(each.validation) == ["code", "web"]
    nothing = open_datasets(blended({"blend": names, "split": "1,0"}))
    assert nothing.validation == {}

    weights = tmp_path / "weights.json"
    phases = [{"samples": 0, "weights": {"code": 1}}, {"samples": 8, "weights": {"web": 1}}]
    weights.write_text(json.dumps(phases))
    data = {"blend": [*names, files["short"]], "weights": str(weights), "split": "1,0"}
    scheduled = open_datasets(blended(data))
    assert isinstance(scheduled.sampler, BlendSampler)
    assert scheduled.sampler.counts(20) == {"code": 8, "web": 12, "short": 0}
    assert len(scheduled.train) == scheduled.sampler.num_samples

    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps({"train": {"files": names, "counts": [6, 18]}}))
    counted = open_datasets(blended({"parts": str(counts)}))
    assert isinstance(counted.sampler, BlendSampler)
    assert counted.sampler.counts(24) == {"code": 6, "web": 18}
    with pytest.raises(ValueError, match=r"sum to 24 samples, steps=7 .* take 28: use steps 6"):
        open_datasets(blended({"parts": str(counts)}, steps=7))
    with pytest.raises(ValueError, match=r"would set aside the counts of the training blend"):
        open_datasets(blended({"parts": str(counts), "weights": str(tmp_path / "w.json")}))


def test_mistakes_are_named_before_anything_is_built(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, only = tmp_path / "weights.json", tmp_path / "only.json"
    weights.write_text('[{"samples": 0, "weights": {"cod": 1}}]')
    only.write_text(json.dumps({"valid": [files["web"]]}))
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(toy_tree(data={"mock": False})))
    missing = str(tmp_path / "gone")
    for options, message in (
        ({"blend": f"0.3 {files['code']} {files['web']}"}, "where a weight should be"),
        ({"blend": f"{files['code']} {missing}"}, f"{missing}.idx: no such file"),
        ({"parts": str(only)}, "names no files for train"),
        ({"blend": f"1 {files['web']} 2 {files['web']}"}, "twice: give it once, with the sum of"),
        (
            {"blend": f"{files['code']} {files['web']}", "weights": str(weights)},
            "weights.json: phase 0: no source is 'cod', there are ['code', 'web']",
        ),
        (
            {"train": files["code"], "blend": files["web"]},
            "data.train and data.blend: each says what to train on, give one",
        ),
    ):
        flags = [word for name, value in options.items() for word in (f"--data.{name}", value)]
        assert main(["pretrain", "--config", str(config), *flags]) == 2
        err = capsys.readouterr().err
        assert err.startswith("mcore-train: ")
        assert err.count("\n") == 1
        assert message in err


def test_options_that_would_not_be_read() -> None:
    a = Path("a")
    for data, message in (
        ({"parts": a, "validation": a}, "data.validation=a would not be read: data.parts=a"),
        ({"train": a, "weights": a}, "data.weights=a is for the files of data.blend or data.parts"),
        ({"train": a, "each_validation": True}, "data.each_validation is for validation files"),
        ({"train": Path("s3://b/c")}, "data.train=s3:/b/c is no path: addresses such"),
        ({"mock": True, "validation": a}, "data.mock makes random tokens, so data.validation=a"),
        ({"mock": True, "blend": ("a",)}, "data.blend and data.mock: each says what to train on"),
    ):
        with pytest.raises(ValueError, match=message):
            DataConfig(**data)  # type: ignore[arg-type]
    tree = toy_tree(data={"mock": False, "blend": [0.5, "a", 2, "b"]})
    assert config_from_tree(tree).data.blend == ("0.5", "a", "2", "b")
    assert config_from_tree(config_to_tree(config_from_tree(tree))) == config_from_tree(tree)


def test_a_tokenizer_that_is_not_there_is_found_out_with_random_tokens_too() -> None:
    with pytest.raises(ValueError, match="nowhere: no tokenizer"):
        open_datasets(toy(data={"mock": True, "tokenizer": "nowhere"}))
    with pytest.raises(ValueError, match=r"vocab_size=64 is smaller than the 257 tokens of byte"):
        open_datasets(toy(data={"mock": True, "tokenizer": "byte"}, model={"vocab_size": 64}))
