import json
import sys
from pathlib import Path

import pytest

from mcore_parallel.cli import main

COST = ["cost", "--model", "llama3-8b-8layers", "--world", "8", "--batch", "32"]
LAYOUT = [*COST, "--layout", "tp=2 pp=2 sp schedule=interleaved chunks=2"]
SCALING = ["scaling", "--model", "llama3-8b-8layers", "--worlds", "1,4", "--seq-length", "2048"]


def run(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    assert main(argv) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def test_one_layout_with_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, LAYOUT).splitlines()
    assert lines[0].startswith("tp=2 pp=2 dp=2 sp schedule=interleaved chunks=2 on 8 GPUs, batch 3")
    seconds = {line[:34].strip(): float(line.split()[-3]) for line in lines if line.endswith("%")}
    step = next(line for line in lines if line.startswith("step "))
    assert sum(seconds.values()) == pytest.approx(float(step.split()[-2]), abs=0.01)
    assert {"matrix products", "waiting for other stages", "messages between stages"} <= {*seconds}
    sizes = [float(line.split()[-2]) for line in lines if line.endswith(" GiB")]
    total = next(line for line in lines if "the fullest" in line)
    assert sum(sizes) == pytest.approx(float(total.split()[-4]), abs=0.3)


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = json.loads(run(capsys, [*LAYOUT, "--json"]))["estimates"]
    assert found["layout"] == "tp=2 pp=2 dp=2 sp schedule=interleaved chunks=2"
    assert found["step"] == pytest.approx(sum(found["seconds"].values()))
    memory = found["memory"]
    parts = [size for name, size in memory.items() if name not in ("total", "of")]
    assert memory["total"] == pytest.approx(sum(parts))
    assert found["fits"]


def test_options_reach_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    def step(*options: str) -> float:
        found = json.loads(run(capsys, [*LAYOUT, *options, "--json"]))["estimates"][0]
        return float(found["step"])

    plain = step()
    assert step("--precision", "fp8") < plain
    assert step("--machine", "a100") > plain
    assert step("--tensor-overlap", "1") < plain
    assert step("--recompute", "full") > plain
    assert step("--micro-batch", "2") != plain
    assert step("--seq-length", "4096") < plain


def test_ranked_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, [*COST, "--seq-length", "2048", "--top", "3"]).splitlines()
    tried, too_large = int(lines[0].split()[0]), int(lines[0].split()[3])
    assert tried > 50
    assert too_large < tried
    rows = [line.split() for line in lines[2:]]
    assert len(rows) == 3
    assert [float(row[2]) for row in rows] == sorted(float(row[2]) for row in rows)


def test_schedules_that_a_ranking_tries(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*COST, "--model", "llama-3-8b", "--machine", "a100", "--top", "60", "--schedules"]
    found = json.loads(run(capsys, [*argv, "zb-h1", "--json"]))["estimates"]
    schedules = {one["layout"].partition("schedule=")[2].split(" ")[0] for one in found}
    assert schedules == {"", "zb-h1"}  # none where there is one stage


def test_a_layout_that_is_too_large_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["cost", "--model", "llama-3-70b", "--world", "8", "--batch", "8", "--layout", "tp=8"]
    assert "GiB of 80: too much" in run(capsys, argv)


def test_models_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    parts = [{"kind": "attention", "num_heads": 8, "kv_heads": 8, "head_size": 64}]
    layers = [{"count": 4, "parts": [*parts, {"kind": "mlp", "width": 2048}]}]
    path.write_text(json.dumps({"hidden_size": 512, "vocab_size": 1000, "layers": layers}))
    argv = ["cost", "--model", str(path), "--world", "1", "--batch", "1", "--layout", "tp=1"]
    assert "of the bf16 peak" in run(capsys, argv)


def test_scaling_over_worlds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    png = tmp_path / "new" / "scaling.png"
    argv = [*SCALING, "--batch-per-gpu", "4", "--png", str(png), "--json"]
    found = json.loads(run(capsys, argv))
    assert [(row["world"], row["batch"]) for row in found["rows"]] == [(1, 4), (4, 16)]
    assert found["batch"] == "growing"
    assert png.read_bytes().startswith(b"\x89PNG")
    lines = run(capsys, [*SCALING, "--batch", "16"]).splitlines()
    assert lines[0] == "llama3-8b-8layers on h100, batch fixed"
    assert [line.split()[:2] for line in lines[2:]] == [["1", "16"], ["4", "16"]]


def test_a_picture_without_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*SCALING, "--batch", "16", "--png", str(tmp_path / "x.png")]) == 2
    assert 'pip install "mcore-parallel[plot]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["cost"], "cost needs --model (or --published)"),
        (["cost", "--model", "llama-3-8b"], "cost needs --world"),
        (["cost", "--model", "llama-3-8b", "--world", "8"], "cost needs --batch"),
        ([*COST, "--model", "llama"], "model 'llama': did you mean"),
        ([*COST, "--machine", "h1000"], "machine 'h1000': did you mean 'h100'"),
        ([*COST, "--layout", "tp=2 sq"], "layout item 'sq'"),
        ([*COST, "--layout", "dp=3"], "world size 8"),
        ([*COST, "--layout", "tp=1", "--batch", "12"], "use batch 8 or 16"),
        ([*COST, "--layout", "tp=1", "--recompute", "some"], "recompute 'some': use none"),
        ([*COST, "--recompute", "full"], "go with --layout"),
        ([*COST, "--top", "0"], "--top 0"),
        ([*COST, "--schedules", "1f1b,zb-x"], "zb-x"),
        ([*COST, "--precision", "fp8", "--machine", "a100"], "a100 has no products in 'fp8'"),
        ([*COST, "--world", "7", "--batch", "3"], "use batch 7"),
        (["scaling", "--batch", "8"], "scaling needs --model"),
        (SCALING, "either --batch or --batch-per-gpu"),
        ([*SCALING, "--batch", "8", "--worlds", "8,x"], "--worlds '8,x'"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("mcore-parallel: ")
    assert err.count("\n") == 1
    assert words in err
