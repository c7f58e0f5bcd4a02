"""`mcore-kernels explain`."""

import json

import pytest

from mcore_kernels import OPERATORS
from mcore_kernels.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["explain", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_table_says_what_runs_and_why_not_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = run(capsys, "--device", "cpu")
    assert status == 0
    lines = out.splitlines()
    assert lines[0].startswith("on cpu float32")
    assert [line for line in lines if not line.startswith((" ", "on "))] == list(OPERATORS)
    at = lines.index("rms_norm")
    assert lines[at + 1].startswith("  x triton")
    assert lines[at + 2].strip() == "needs a CUDA device, the target is cpu"
    assert lines[at + 3].startswith("  * eager")
    assert lines[at + 5].startswith("  - reference")


def test_json_for_a_device_that_is_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--arch", "9.0", "--head-dim", "128", "--json")
    assert status == 0
    data = json.loads(out)
    assert data["target"] == {
        "device": "cuda",
        "arch": [9, 0],
        "dtype": "bfloat16",
        "head_dim": 128,
    }
    assert set(data["operators"]) == set(OPERATORS)
    attention = data["operators"]["attention"]
    assert attention["chosen"] == "cudnn"
    (sdpa,) = [one for one in attention["implementations"] if one["name"] == "sdpa"]
    assert (sdpa["status"], sdpa["reason"]) == ("refused", "needs cpu, the target is cuda")


def test_one_operator(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--device", "cpu", "--op", "gelu", "--json")
    assert status == 0
    assert list(json.loads(out)["operators"]) == ["gelu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "bfloat"], "--dtype 'bfloat': did you mean 'bfloat16'?"),
        (["--arch", "90"], "--arch is a compute capability such as 9.0, got '90'"),
        (["--device", "cpu", "--arch", "9.0"], "--arch describes a CUDA device, not --device cpu"),
        (["--device", "gpu"], "--device gpu: "),
        (["--device", "cpu", "--op", "rmsnorm"], "no operator 'rmsnorm'; did you mean 'rms_norm'?"),
        (["--device", "cpu", "--head-dim", "0"], "target head_dim must be at least 1, got 0"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"mcore-kernels: {message}")
    assert err.count("\n") == 1


def test_no_cuda_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, _, err = run(capsys, "--device", "cuda")
    assert status == 2
    assert err == "mcore-kernels: no CUDA device here; --arch 9.0 describes one that is elsewhere\n"
