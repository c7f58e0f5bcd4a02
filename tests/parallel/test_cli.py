import json
import os
import sys

import pytest
import torch.distributed as dist

from mcore_parallel import ParallelConfig, ParallelMesh
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


def test_layers_of_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--world", "4", "--pp", "4", "--layers", "30")
    assert "stage 0: layers 0-7 (8)\n" in text
    assert "stage 3: layers 23-29 (7)\n" in text
    argv = ["--world", "2", "--pp", "2", "--layers", "3", "--stage-layers"]
    assert "stage 0: no layers\nstage 1: layers 0-2 (3)\n" in run(capsys, *argv, "0,3")


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
        ("--world 2 --pp 2 --stage-layers 4,4", "--stage-layers needs --layers (these sum to 8)"),
        ("--world 2 --pp 2 --layers 8 --stage-layers 4;4", "'4;4' is not of the form 8,8,7,7"),
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
