import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

import mcore_parallel
from mcore_parallel import Group, ParallelConfig, ParallelMesh, _public
from mcore_parallel.cli import main
from mcore_parallel.testing import RankPool


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["layout", *argv]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def test_table_of_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--world", "8", "--tp", "2", "--pp", "2", "--sequence-parallel")
    lines = text.splitlines()
    assert lines[0] == "tp=2 pp=2 dp=2 sp over 8 ranks"
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:] if line}
    assert rows["tp"] == ["2", "4", "1", "0", "1"]
    assert rows["pp"] == ["2", "4", "4", "0", "4"]
    assert rows["rank"] == ["tp", "cp", "dp", "pp", "etp", "ep", "edp"]
    assert rows["7"] == ["1", "0", "1", "1", "1", "0", "1"]
    assert not dist.is_initialized()


def test_large_world_as_json_agrees_with_the_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--world", "4096", "--tp", "8", "--pp", "4", "--ep", "16", "--etp", "1", "--json"]
    found = json.loads(run(capsys, *argv))
    config = ParallelConfig(tp=8, pp=4, ep=16, etp=1)
    for rank in (0, 1234, 4095):
        mesh = ParallelMesh.arithmetic(config, world_size=4096, rank=rank)
        assert {axis: column[rank] for axis, column in found["ranks"].items()} == mesh.coords
        one = json.loads(run(capsys, *argv, "--rank", str(rank)))
        assert one["coords"] == mesh.coords
        for name, members in one["groups"].items():
            assert tuple(members) == getattr(mesh, name).ranks
    assert {row["axis"]: row["groups"] for row in found["axes"]}["ep"] == 256
    assert len(found["ranks"]["tp"]) == 4096


def test_one_rank_shows_the_members_of_its_groups(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--world", "8", "--tp", "2", "--cp", "2", "--rank", "5")
    lines = text.splitlines()
    assert "tp=1 cp=0 dp=1 pp=0 etp=1 ep=0 edp=2" in lines
    groups = {line.split()[0]: line.split()[1:] for line in lines[4:] if line}
    assert groups["tp"] == ["2", "4", "5"]
    assert groups["dp_cp"] == ["4", "1", "3", "5", "7"]
    assert groups["embedding"] == ["1", "5"]
    assert "dp_shard" not in groups  # it is dp_cp
    text = run(capsys, "--world", "8", "--zero", "3", "--replicas", "2", "--rank", "5")
    assert text.startswith("tp=1 pp=1 dp=8 zero=3 replicas=2 over 8 ranks")
    groups = {line.split()[0]: line.split()[1:] for line in text.splitlines()[4:] if line}
    assert groups["dp_shard"] == ["4", "4", "5", "6", "7"]
    assert groups["edp_copies"] == ["2", "1", "5"]


def test_parts_and_rings_of_two_level_attention(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--world", "16", "--tp", "2", "--cp", "8", "--cp-kind", "ring+two-level+two-level:4"]
    rows = {line.split()[0]: line.split()[1:] for line in run(capsys, *argv).splitlines() if line}
    assert rows["cp_part/2"] == ["2", "8", "2", "0", "2"]
    assert rows["cp_ring/2"] == ["4", "4", "4", "0", "4", "8", "12"]
    assert rows["cp_ring/4"] == ["2", "8", "8", "0", "8"]
    groups = json.loads(run(capsys, *argv, "--rank", "11", "--json"))["groups"]
    assert groups["cp_part/4"] == [9, 11, 13, 15]
    assert groups["cp_ring/4"] == [3, 11]
    assert "cp_part" not in run(capsys, "--world", "4", "--cp", "2", "--cp-kind", "two-level")


def test_layers_of_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--world", "4", "--pp", "4", "--layers", "30")
    assert "stage 0: layers 0-7 (8)\n" in text
    assert "stage 3: layers 23-29 (7)\n" in text
    argv = ["--world", "2", "--pp", "2", "--layers", "3", "--stage-layers"]
    assert "stage 0: no layers\nstage 1: layers 0-2 (3)\n" in run(capsys, *argv, "0,3")
    assert "stage 0: no layers\nstage 1: layers 0-2 (3)\n" in run(capsys, *argv, "E|t*3L")


def test_layers_of_virtual_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """Case U05: only the last stage's count is given; every layer is there once."""
    argv = ["--world", "2", "--pp", "2", "--layers", "10", "--last-layers", "4", "--schedule"]
    looped = run(capsys, *argv, "interleaved")
    assert "stage 0: layers 0-2 (3), layers 5-7 (3)\n" in looped
    assert "stage 1: layers 3-4 (2), layers 8-9 (2)\n" in looped
    turned = run(capsys, *argv, "zb-v")
    assert "stage 0: layers 0-2 (3), layers 7-9 (3)\n" in turned
    assert "stage 1: layers 3-4 (2), layers 5-6 (2)\n" in turned
    argv = [
        "--world",
        "4",
        "--pp",
        "4",
        "--layers",
        "30",
        "--count-embedding",
        "--count-loss",
        "--json",
    ]
    found = json.loads(run(capsys, *argv))["stage_layers"]
    assert [len(layers) for [layers] in found] == [7, 8, 8, 7]


def test_order(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--world", "4", "--tp", "2", "--order", "dp-tp-pp-cp-ep", "--rank", "1")
    assert "tp             2  1 3\n" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--world 10 --tp 4", "world size 10 is not a multiple of"),
        ("--world 8 --rank 8", "rank 8 is not in a world of 8 ranks"),
        ("--world 4 --tp 4 --sequence-parallel --seq-length 10", "lengths: 8 and 12"),
        ("--world 2 --pp 2 --layers 10 --stage-layers 4,4", "sum to 8, not to 10 layers"),
        ("--world 2 --pp 2 --stage-layers 4,4", "--stage-layers needs --layers"),
        ("--world 2 --pp 2 --layers 8 --stage-layers 4;4", "'4;4' is not of the form 8,8,7,7"),
        ("--world 2 --pp 2 --first-layers 4", "--first-layers needs --layers"),
        ("--world 2 --pp 2 --schedule zb", "schedule 'zb': did you mean 'zb-v'?"),
        ("--world 2 --schedule zb-v", "chunks = 2 on pp = 1 stage: use pp ≥ 2"),
        ("--world 8 --cp 8 --cp-kind two-level:3", "inner must be one of 1, 2, 4, 8"),
        ("--world 4 --order tp-xp", "order 'tp-xp' must name"),
        ("--world 0", "world size must be at least 1, not 0"),
    ],
)
def test_mistakes_get_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], argv: str, message: str
) -> None:
    assert main(["layout", *argv.split()]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("mcore-parallel: ")
    assert output.err.count("\n") == 1
    assert message in output.err


def print_to_a_closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    stdout = os.dup(1)
    os.dup2(writer, 1)
    try:
        status = main(["layout", "--world", "20000"])
        sys.stdout.flush()
    finally:
        os.dup2(stdout, 1)
    return status


def test_reader_that_stops_early_is_no_error(ranks: RankPool) -> None:
    assert ranks.run(print_to_a_closed_pipe, 1) == [0]


def test_layout_and_schedule_start_without_torch() -> None:
    """100,000 ranks in about a second, of which importing torch alone would take several."""
    code = (
        "import sys, time\n"
        "from mcore_parallel.cli import main\n"
        "began = time.process_time()\n"
        "main('layout --world 100000 --tp 8 --pp 4 --cp 5 --layers 80'.split())\n"
        "seconds = time.process_time() - began\n"
        "main('schedule --kind zb-v --stages 4 --microbatches 8'.split())\n"
        "sys.exit('torch' in sys.modules or 10 * (seconds > 5))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") > 100_000


def test_names_are_found_when_asked_for() -> None:
    assert mcore_parallel.Group is Group
    assert set(_public.__all__) == set(mcore_parallel.__all__)
    assert mcore_parallel.pipeline.run_schedule.__module__ == "mcore_parallel.pipeline.executor"
    with pytest.raises(AttributeError, match="'mcore_parallel' has no attribute 'Grup'"):
        mcore_parallel.Grup  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'gpip'"):
        from mcore_parallel.pipeline import gpip  # noqa: F401


@pytest.mark.parametrize(
    "package", [mcore_parallel, mcore_parallel.context, mcore_parallel.pipeline]
)
def test_no_submodule_hides_a_public_name(package: ModuleType) -> None:
    """An imported submodule becomes an attribute, which would be found first."""
    assert not {module.name for module in pkgutil.iter_modules(package.__path__)} & {
        *package.__all__
    }


def schedule(capsys: pytest.CaptureFixture[str], argv: str) -> str:
    assert main(["schedule", *argv.split()]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def test_schedules_compared(capsys: pytest.CaptureFixture[str]) -> None:
    text = schedule(capsys, "--stages 8 --microbatches 32")
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()[2:]}
    assert rows == {
        "1f1b": ["1", "17.9%", "117", "8", "8", "1"],
        "gpipe": ["1", "17.9%", "117", "32", "32", "32"],
        "interleaved": ["2", "9.9%", "106.5", "11.5", "11.5", "4.5"],
        "zb-h1": ["1", "6.8%", "103", "8", "8", "8"],
        "zb-v": ["2", "3.5%", "99.5", "8", "8", "8"],
    }
    found = json.loads(schedule(capsys, "--stages 8 --microbatches 32 --chunks 4 --json"))
    bubble = next(s["bubble"] for s in found["schedules"] if s["kind"] == "interleaved")
    assert bubble == pytest.approx(7 / (4 * 32 + 7))


def test_pairs_hide_exchanges(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "--stages 8 --microbatches 32 --exchange 1"
    alone, paired = schedule(capsys, argv), schedule(capsys, f"{argv} --paired")
    assert "1f1b              1    17.9%       195       8       8       1\n" in alone
    rows = {line.split()[0]: line.split()[1:] for line in paired.splitlines()[2:]}
    assert rows == {
        "1f1b": ["1", "15.8%", "133", "16", "16", "2"],
        "interleaved": ["2", "8.6%", "122.5", "12", "12", "5"],
    }
    drawn = schedule(capsys, "--kind 1f1b --stages 1 --microbatches 2 --exchange 1 --paired")
    assert drawn.endswith("stage 0 |F0--- F1+B0--- B1------ |\n")


def test_schedule_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "new" / "out.png"
    argv = f"--kind interleaved --stages 4 --chunks 2 --microbatches 8 --png {file}"
    text = schedule(capsys, argv)
    assert "interleaved       2    15.8%      28.5     5.5     5.5     2.5\n" in text
    assert text.count("\nstage ") == 4
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--kind pipe", "schedule 'pipe': did you mean 'gpipe'?"),
        ("--png x.png", "--png draws one schedule: give its --kind"),
        ("--kind interleaved --group 3", "a group of 3 micro-batches is smaller than"),
        ("--kind 1f1b --chunks 2", "1f1b with chunks = 2: use chunks = 1, or"),
        ("--microbatches 0", "at least 1 of micro-batches, not 0"),
        ("--micro-batches 0", "at least 1 of micro-batches, not 0"),
        ("--weight -1", "--weight -1.0: a time is 0 or more"),
        ("--exchange -1", "--exchange -1.0: a time is 0 or more"),
        ("--kind zb-h1 --paired", "zb-h1 has no pairs of a forward and another micro-batch's"),
    ],
)
def test_mistakes_in_schedules(capsys: pytest.CaptureFixture[str], argv: str, message: str) -> None:
    assert main(["schedule", "--stages", "4", "--microbatches", "8", *argv.split()]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("mcore-parallel: ")
    assert output.err.count("\n") == 1
    assert message in output.err


DOCS = Path(__file__).resolve().parents[2] / "docs"
SHOWN = re.findall(
    r"^```text\n\$ mcore-parallel (.*?)\n(.*?)^```$",
    (DOCS / "pipelines.md").read_text(),
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize(("argv", "text"), SHOWN, ids=[argv for argv, _ in SHOWN])
def test_the_documentation_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], argv: str, text: str
) -> None:
    assert main(argv.split()) == 0
    assert capsys.readouterr().out == text


def test_code_of_the_documentation_runs() -> None:
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", (DOCS / "pipelines.md").read_text(), re.M | re.S
    )
    exec(code, {})
    assert len(SHOWN) == 4
