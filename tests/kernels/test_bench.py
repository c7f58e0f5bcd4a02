"""`mcore-kernels bench` and `doctor`, and the data that kernels are launched with."""

import json
from pathlib import Path

import pytest
import torch

from mcore_kernels import OPERATORS, Implementation, Operator, Target
from mcore_kernels.bench import BENCHED, Limits, Sizes, Timing, bench, command, measure, timing
from mcore_kernels.cli import main
from mcore_kernels.ops.rms_norm.reference import rms_norm
from mcore_kernels.tuning import parameters

CPU = torch.device("cpu")
SMALL = ["--device", "cpu", "--tokens", "8", "--hidden", "128", "--repeats", "3"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are thrown out by less, and the limits are those of small numbers."""
    for name in ("_FLUSH", "_COPY"):
        monkeypatch.setattr(measure, name, {"cpu": 1 << 16})
    monkeypatch.setattr(measure, "_MATMUL", {"cpu": 32})


def test_a_limit_is_of_bytes_or_of_operations() -> None:
    limits = Limits(copy_bytes=100.0, matmul_flops=1000.0)
    assert limits.seconds(num_bytes=50, flops=100) == 0.5
    assert limits.seconds(num_bytes=5, flops=100) == 0.1
    measured = measure.measure_limits(CPU, torch.float32, repeats=3)
    assert measured.copy_bytes > 0 < measured.matmul_flops


def test_the_median_and_the_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 5, 10, 11, 20, 24, 30, 32, 40, 43])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    calls: list[int] = []
    found = timing(lambda: calls.append(1), CPU, 5)
    assert found == Timing(median=3, low=2, high=4)
    assert found.spread == pytest.approx(2 / 3)
    assert len(calls) == 7


def test_every_call_runs_in_every_implementation() -> None:
    limits = Limits(copy_bytes=1e9, matmul_flops=1e9)
    found = list(
        bench(
            BENCHED, Target(), device=CPU, limits=limits, sizes=Sizes(tokens=6, hidden=128),
            repeats=3, every=True,
        )
    )  # fmt: skip
    assert {one.op for one in found} == set(BENCHED)
    names = {one.implementation for one in found if one.op == "rms_norm"}
    assert names == {"reference", "eager", "invariant"}
    assert all(one.ratio > 0 for one in found)
    one = next(one for one in found if one.op == "adam")
    # 6 x 128 numbers: value, moments read and written, gradient read, copy written.
    assert one.ratio == pytest.approx(6 * 128 * 30 / 1e9 / one.timing.median)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "numbers.json"
    assert main(["bench", *SMALL, "--op", "swiglu", "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "8 tokens x 128" in lines[0]
    assert [line.split()[:3] for line in lines[2:]] == [
        ["swiglu", "reference", "forward"],
        ["swiglu", "reference", "backward"],
    ]
    document = json.loads(out.read_text())
    assert (document["tokens"], document["dtype"]) == (8, "float32")
    for one in document["results"]:
        assert one["low_s"] <= one["median_s"] <= one["high_s"]
        size = 8 * 128 * 4 * 4 * (1.5 if one["work"] == "forward" else 2.5)
        assert one["ratio"] == pytest.approx(size / document["copy_bytes_per_s"] / one["median_s"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--op", "gated_delta"],
            "no operator 'gated_delta'; did you mean 'gated_delta_rule'?",
        ),
        (["--op", "gelus"], "no operator 'gelus'; did you mean 'gelu'?"),
        (["--hidden", "200"], "hidden must be a multiple of 128, got 200; 256 is"),
        (["--tokens", "0"], "tokens must be at least 1, got 0"),
        (["--repeats", "2"], "--repeats must be at least 3, for a median and a spread; got 2"),
        (["--json", "/no/such/file"], "--json /no/such/file: there is no folder /no/such"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["bench", *SMALL, *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"mcore-kernels: {message}")


def test_the_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "OPERATORS", {"gelu": OPERATORS["gelu"]})
    assert main(["doctor", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "cases agree with the specification" in out
    assert out.endswith("all is well\n")


def test_the_doctor_finds_a_kernel_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(x: torch.Tensor, weight: torch.Tensor, eps: float, **rest: bool) -> torch.Tensor:
        return rms_norm(x, weight, eps * 2 + 0.01, **rest)

    faulty = (
        *OPERATORS["rms_norm"].implementations,
        Implementation(op="rms_norm", name="wrong", fn=wrong, priority=99),
    )
    table = {**OPERATORS, "rms_norm": Operator("rms_norm", faulty)}
    monkeypatch.setattr("mcore_kernels.registry.OPERATORS", table)
    monkeypatch.setattr(command, "OPERATORS", {"rms_norm": table["rms_norm"]})
    assert main(["doctor", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "FAILED: AssertionError: rms_norm: 'wrong' in float64" in out
    assert out.endswith("1 of 1 operators failed\n")


def test_launch_parameters_are_data() -> None:
    default, there = parameters("sm_999"), parameters("interpreter")
    assert default["adam"]["block"] > there["adam"]["block"]
    assert {op: set(values) for op, values in there.items()} == {
        op: set(values) for op, values in default.items()
    }
