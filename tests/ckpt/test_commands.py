"""diff, average, reshard, verify: what they do and print, and what they refuse."""

import io
import json
import math
from pathlib import Path

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.averaging import average
from mcore_ckpt.cli import main
from mcore_ckpt.comparing import compare_checkpoints
from mcore_ckpt.progress import ProgressLine
from mcore_ckpt.rewriting import rewrite
from mcore_parallel.layout import LayoutTensor, TensorLayout


def save(directory: Path, values: dict[str, torch.Tensor], step: int = 3) -> Path:
    tensors = {
        name: LayoutTensor(value, TensorLayout.whole(name, tuple(value.shape)))
        for name, value in values.items()
    }
    state = {"config": {"seed": step}}
    files = {"v.txt": b"abc"}
    return mcore_ckpt.save(directory, step=step, tensors=tensors, state=state, files=files)


def model(scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "model/w": torch.arange(12.0).view(3, 4) * scale,
        "model/half": (torch.arange(6.0) * scale).bfloat16(),
        "model/ids": torch.arange(4),
        "model/mask": torch.arange(4) % 2 == 0,
        "exp_avg/w": torch.ones(3, 4) * scale,
    }


def test_equal_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nan = {"model/nan": torch.tensor([math.nan, math.inf, -0.0])}
    a = save(tmp_path / "a", model() | nan)
    b = save(tmp_path / "b", model() | nan, step=9)
    found = compare_checkpoints(a, b)
    assert found.within(0)
    assert found.num_compared == 6
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == "6 tensors compared: same\n"


@pytest.mark.parametrize(
    ("name", "value", "error", "count"),
    [
        ("model/w", torch.arange(12.0).view(3, 4).index_fill(1, torch.tensor([2]), 0.5), 9.5, 3),
        ("model/half", torch.tensor([0.0, 1.0, math.nan, 3.0, 4.0, 5.0]).bfloat16(), math.inf, 1),
        ("model/ids", torch.tensor([0, 1, 2, 2**60 + 1]), 2.0**60, 1),
        ("model/mask", torch.tensor([True, True, True, False]), 1.0, 1),
    ],
)
def test_a_tensor_that_differs(
    tmp_path: Path, name: str, value: torch.Tensor, error: float, count: int
) -> None:
    a, b = save(tmp_path / "a", model()), save(tmp_path / "b", model() | {name: value})
    (difference,) = compare_checkpoints(a, b).tensors
    assert (difference.name, difference.num_different) == (name, count)
    assert difference.max_error == pytest.approx(error)
    assert not compare_checkpoints(a, b, patterns=["model/*"]).within(0)
    assert compare_checkpoints(a, b, patterns=["exp_avg/*"]).within(0)


def test_large_integers_that_differ_by_one(tmp_path: Path) -> None:
    """float64 does not tell 2^60 from 2^60 + 1; the comparison does."""
    a = save(tmp_path / "a", {"model/n": torch.tensor([2**60])})
    b = save(tmp_path / "b", {"model/n": torch.tensor([2**60 + 1])})
    (difference,) = compare_checkpoints(a, b).tensors
    assert difference.max_error == 1.0


def test_diff_prints_and_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = model()
    other = a["model/w"].clone()
    other[1, 1] += 0.25
    b = {k: v for k, v in a.items() if k != "model/mask"} | {
        "model/w": other,
        "model/half": a["model/half"].float(),
        "model/ids": torch.arange(5),
        "model/new": torch.ones(1),
    }
    arguments = ["diff", str(save(tmp_path / "a", a)), str(save(tmp_path / "b", b))]
    assert main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"model/mask: only in {tmp_path}/a/step_00000003",
        f"model/new: only in {tmp_path}/b/step_00000003",
        "model/ids [4] and [5]: other shapes",
        "model/w     max error 0.25  1 of 12 elements",
        "model/half  max error 0  0 of 6 elements  bfloat16 and float32",
        "3 tensors compared: different",
    ]
    assert main([*arguments, "--only", "model/w", "--tolerance", "0.2"]) == 1
    assert main([*arguments, "--only", "model/w", "--only", "*/half", "--tolerance", "0.3"]) == 0
    assert main([*arguments, "--only", "model/half"]) == 1
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is False
    assert found["tensors"]["model/w"] == {
        "dtypes": ["float32", "float32"],
        "max_error": 0.25,
        "different": 1,
        "elements": 12,
    }
    assert main([*arguments, "--only", "model/typo"]) == 2
    assert "no tensor is called 'model/typo'" in capsys.readouterr().err
    assert main([*arguments, "--tolerance", "nan"]) == 2


def test_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [str(save(tmp_path / f"{i}", model(scale), step=i)) for i, scale in enumerate((1, 3))]
    target = tmp_path / "mean"
    assert main(["average", *sources, "--to", str(target), "--weights", "3,1"]) == 0
    assert "the mean of 2 checkpoints" in capsys.readouterr().out
    opened = mcore_ckpt.open(target)
    assert sorted(opened) == ["model/half", "model/ids", "model/mask", "model/w"]
    assert torch.equal(opened["model/w"], torch.arange(12.0).view(3, 4) * 1.5)
    assert torch.equal(opened["model/half"], (torch.arange(6.0) * 1.5).bfloat16())
    assert torch.equal(opened["model/ids"], torch.arange(4))
    assert opened.step == 1
    assert opened.state["config"] == {"seed": 1}
    assert opened.state["average"] == {"of": sources, "weights": [0.75, 0.25]}
    assert opened.file("v.txt") == b"abc"
    assert not mcore_ckpt.verify(target).problems


def test_a_mean_is_rounded_once(tmp_path: Path) -> None:
    """In bfloat16 the sum of the parts would already be wrong."""
    values = [torch.tensor([1.0 + i / 128]).bfloat16() for i in range(8)]
    sources = [save(tmp_path / f"{i}", {"model/x": value}) for i, value in enumerate(values)]
    mean = mcore_ckpt.open(average(sources, tmp_path / "mean"))["model/x"]
    exact = torch.stack([value.double() for value in values]).mean(0)
    assert torch.equal(mean, exact.bfloat16())


def test_what_has_no_mean_is_refused(tmp_path: Path) -> None:
    a = save(tmp_path / "a", model())
    ids = save(tmp_path / "ids", model() | {"model/ids": torch.arange(4) + 1})
    less = save(tmp_path / "less", {"model/w": torch.zeros(3, 4)})
    shape = save(tmp_path / "shape", model() | {"model/w": torch.zeros(4, 3)})
    for other, message in (
        (ids, "model/ids is int64 and differs between .*: it has no mean"),
        (less, "less/step_00000003 has no model/half, .*a/step_00000003 has"),
        (shape, r"model/w is \[4, 3\] in .* and \[3, 4\] in "),
    ):
        with pytest.raises(ValueError, match=message):
            average([other, a], tmp_path / "mean")
        assert not mcore_ckpt.latest(tmp_path / "mean")
    for bad, message in (
        ([1.0], "1 weights for 2 checkpoints"),
        ([0.0, 0.0], "not all be 0"),
        ([2.0, -1.0], "not all be 0"),
        ([1e308, 1e308], "their sum must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            average([a, a], tmp_path / "mean", weights=bad)
    with pytest.raises(ValueError, match="at least 2 checkpoints, not 1"):
        average([a], tmp_path / "mean")
    with pytest.raises(ValueError, match="is not empty"):
        average([a, a], tmp_path / "a")


def test_reshard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = save(tmp_path / "a", model()), tmp_path / "b"
    arguments = ["reshard", str(source), str(target), "--only", "model/*", "--chunk-size", "16"]
    arguments += ["--rename", "model/(w|half)", "model/x.{1}", "--dtype", "bfloat16"]
    assert main(arguments) == 0
    assert "4 tensors, 72 bytes" in capsys.readouterr().out
    opened = mcore_ckpt.open(target)
    assert sorted(opened) == ["model/ids", "model/mask", "model/x.half", "model/x.w"]
    assert torch.equal(opened["model/x.w"], torch.arange(12.0).view(3, 4).bfloat16())
    assert opened["model/ids"].dtype == torch.int64
    assert opened.info("model/x.w").chunk_bytes <= 16
    assert (opened.step, opened.state, opened.file("v.txt")) == (3, {"config": {"seed": 3}}, b"abc")
    again = rewrite(source, tmp_path / "c", chunk_bytes=8)
    assert compare_checkpoints(source, again).within(0)
    assert not mcore_ckpt.verify(again).problems


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--chunk-size", "big"], "--chunk-size 'big' is no size"),
        (["--chunk-size", "0"], "chunk_bytes is 0; nearest valid: 1"),
        (["--only", "x"], "no tensor is called 'x'"),
        (["--rename", "x", "y"], "rename 'x' matches no tensor"),
        (["--rename", "model/(w|half)", "model/same"], "would both be called model/same"),
    ],
)
def test_reshard_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    source = save(tmp_path / "a", model())
    assert main(["reshard", str(source), str(tmp_path / "b"), *more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "b").exists()


def test_verify_as_json_finds_a_flipped_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path, model())
    assert main(["verify", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["whole"] is True
    chunk = path / "model/half/c.0"
    data = bytearray(chunk.read_bytes())
    data[3] ^= 0x40
    chunk.write_bytes(bytes(data))
    assert main(["verify", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["whole"] is False
    (problem,) = found["problems"]
    assert (problem["tensor"], problem["chunk"]) == ("model/half", [0])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_on_terminals_alone() -> None:
    times = iter([0.0, 1.0, 1.05, 2.0, 3.0])
    for stream in (Terminal(), io.StringIO()):
        times = iter([0.0, 1.0, 1.05, 2.0, 3.0])
        with ProgressLine("reading", 4_000_000, stream, lambda t=times: next(t)) as line:
            line(1_000_000)
            line(1_000_000)  # too soon after the last to be drawn
            line(1_000_000)
        text = stream.getvalue()
        if not stream.isatty():
            assert text == ""
            continue
        first, second, end = text.split("\r")[1:]
        assert "reading [########" in first
        assert " 25%  1 MB/s  3 s left" in first
        assert " 75%" in second
        assert end == "\x1b[K"
