"""Conversion into and out of torch.distributed.checkpoint, and kinds found by what is there."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import mcore_ckpt
from mcore_ckpt.cli import main
from mcore_ckpt.convert import convert
from mcore_ckpt.dcp import DcpFolder
from mcore_ckpt.hf import SafetensorsFolder
from mcore_parallel.layout import LayoutTensor, TensorLayout

sys.path.append(str(Path(__file__).parent))
from toy_architecture import CONFIG, KNOWN, SIZES, our_values, their_values, write_folder


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and bits are equal: some of the values are no numbers."""
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)


OPTIMIZER = {"step": 5, "state_names": ["exp_avg", "exp_avg_sq"]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A checkpoint with moments and with state that is not carried."""
    values = {f"model/{name}": value for name, value in our_values().items()}
    for kind in OPTIMIZER["state_names"]:  # type: ignore[union-attr]
        values |= {f"{kind}/{n}": torch.randn(v.shape) for n, v in our_values().items()}
    tensors = {n: LayoutTensor(v, TensorLayout.whole(n, tuple(v.shape))) for n, v in values.items()}
    state = {"config": {"model": SIZES}, "optimizer": OPTIMIZER, "rng": {"seed": 1}}
    mcore_ckpt.save(tmp_path / "run", step=7, tensors=tensors, state=state)
    return tmp_path / "run"


def _torch_save(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        torch_dcp.save(state, checkpoint_id=folder, no_dist=True)


def test_weights_and_moments_go_to_dcp_and_back(run: Path, tmp_path: Path) -> None:
    before = mcore_ckpt.open(run)
    done = convert(("native", run), ("dcp", tmp_path / "dcp"), max_shard_bytes=1000)
    assert done.num_tensors == len(before)
    weights = {n: torch.zeros_like(v) for n, v in our_values().items()}
    moments = {n: {"exp_avg": torch.zeros(v.shape)} for n, v in weights.items()}
    asked = {"model": weights, "optimizer": {"state": moments}, "state": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.load(asked, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, value in weights.items():
        assert same(value, before[f"model/{name}"])
        assert same(moments[name]["exp_avg"], before[f"exp_avg/{name}"])
    assert json.loads(asked["state"])["optimizer"] == OPTIMIZER  # type: ignore[arg-type]
    convert(("auto", tmp_path / "dcp"), ("native", tmp_path / "back"))
    after = mcore_ckpt.open(tmp_path / "back")
    assert set(after) == set(before)
    assert all(same(after[name], before[name]) for name in before)
    assert after.step == 7
    assert after.state["optimizer"] == OPTIMIZER
    assert after.state["config"]["model"] == SIZES


def test_weights_alone_go_to_hugging_face(run: Path, tmp_path: Path) -> None:
    convert(("native", run), ("dcp", tmp_path / "dcp"), dtype=torch.bfloat16)
    folder = DcpFolder(tmp_path / "dcp")
    assert {folder.meta(name).dtype for name in folder if name.startswith("optimizer")} == {
        torch.float32
    }
    convert(("dcp", tmp_path / "dcp"), ("hf", tmp_path / "hf"), known=KNOWN)
    convert(("native", run), ("hf", tmp_path / "direct"), dtype=torch.bfloat16, known=KNOWN)
    one, other = SafetensorsFolder(tmp_path / "hf"), SafetensorsFolder(tmp_path / "direct")
    assert set(one) == set(other)
    assert all(same(one.read(name), other.read(name)) for name in one)


@pytest.mark.parametrize("prefix", ["", "model.", "app.model.module."])
def test_folders_of_others_need_a_config_json(prefix: str, tmp_path: Path) -> None:
    """Names are Hugging Face's behind whatever leads to them; moments lie below `optimizer`."""
    theirs = their_values()
    state: dict[str, Any] = {f"{prefix}{name}": value for name, value in theirs.items()}
    moments = {name: torch.randn(value.shape) for name, value in theirs.items()}
    state |= {f"optimizer.state.{n}.exp_avg": v for n, v in moments.items()}
    state |= {f"optimizer.state.{n}.step": torch.tensor(3.0) for n in moments}
    _torch_save(state, tmp_path / "dcp")
    with pytest.raises(ValueError, match=r"put the config\.json of its architecture there"):
        convert(("auto", tmp_path / "dcp"), ("native", tmp_path / "run"), known=KNOWN)
    (tmp_path / "dcp" / "config.json").write_text(json.dumps(CONFIG))
    convert(("auto", tmp_path / "dcp"), ("native", tmp_path / "run"), known=KNOWN)
    found = mcore_ckpt.open(tmp_path / "run")
    for name, value in our_values().items():
        assert same(found[f"model/{name}"], value)
    assert same(found["exp_avg/embedding.weight"], moments["emb"])
    assert found.state["optimizer"] == {"step": 3, "state_names": ["exp_avg"]}


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    theirs = their_values()
    theirs.pop("h.1.o")
    _torch_save({"model": theirs}, tmp_path / "dcp")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match=r"layers\.1\.attention\.o\.weight is missing"):
        convert(("dcp", tmp_path / "dcp"), ("native", tmp_path / "run"), known=KNOWN)
    _torch_save({"a": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(ValueError, match="has no tensor that its config"):
        convert(("dcp", tmp_path / "other"), ("native", tmp_path / "run"), known=KNOWN)


def test_kinds_are_found(run: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "hf")
    convert(("auto", tmp_path / "hf"), ("native", tmp_path / "a"), known=KNOWN)
    convert(("auto", tmp_path / "a"), ("dcp", tmp_path / "b"), known=KNOWN)
    assert set(DcpFolder(tmp_path / "b")) == {f"model.{name}" for name in our_values()}
    with pytest.raises(FileNotFoundError, match="no checkpoint of a kind that is known"):
        convert(("auto", tmp_path), ("dcp", tmp_path / "c"), known=KNOWN)
    with pytest.raises(ValueError, match="kind 'megatron' is none of hf, native, dcp"):
        convert(("native", run), ("megatron", tmp_path / "c"))
    with pytest.raises(ValueError, match="is not empty"):
        convert(("native", run), ("dcp", tmp_path / "b"))


def test_the_command_tells_what_it_wrote(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "dcp")
    assert main(["convert", "--from", "auto", str(run), "--to", "dcp", target]) == 0
    assert capsys.readouterr().out.startswith(f"{target}: {3 * len(our_values())} tensors, ")
    assert main(["convert", "--from", "auto", str(tmp_path), "--to", "dcp", target + "2"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mcore-ckpt: ")
    assert err.count("\n") == 1
