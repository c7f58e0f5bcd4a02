"""The command line: what it prints, and its exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.cli import main
from mcore_parallel.layout import LayoutTensor, TensorLayout


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shapes = {"model/embedding.weight": (1000, 300), "model/scale": (), "exp_avg/scale": ()}
    for step in (1, 12):
        tensors = {
            name: LayoutTensor(torch.ones(shape).bfloat16(), TensorLayout.whole(name, shape))
            for name, shape in shapes.items()
        }
        mcore_ckpt.save(
            tmp_path, step=step, tensors=tensors, state={"loader": {}}, files={"v.txt": b"abc"}
        )
    return tmp_path


def test_inspect_shows_the_newest(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step_00000012"
    assert "step 12, format version 1, written by mcore-ckpt" in lines[1]
    assert "  exp_avg/  1 tensor, 2 B" in lines
    assert "  model/  2 tensors, 585.9 KiB" in lines
    assert "    embedding.weight  bfloat16  [1000, 300]  585.9 KiB" in lines
    assert "    v.txt  3 B" in lines
    assert "  state: loader" in lines
    assert lines[-1] == "  total: 3 tensors, 585.9 KiB"


def test_inspect_as_json(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(directory / "step_00000001"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["step"] == 1
    assert summary["tensors"]["model/embedding.weight"] == {
        "dtype": "bfloat16",
        "shape": [1000, 300],
        "bytes": 600000,
        "chunks": 1,
    }
    assert summary["total_bytes"] == 600004


def test_verify(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(directory)]) == 0
    assert "step_00000012: whole (3 tensors, 3 chunks, 600004 bytes checked)" in (
        capsys.readouterr().out
    )
    chunk = directory / "step_00000012" / "model" / "embedding.weight" / "c.0.0"
    data = bytearray(chunk.read_bytes())
    data[77] ^= 1
    chunk.write_bytes(bytes(data))
    assert main(["verify", str(directory)]) == 1
    out = capsys.readouterr().out
    assert "tensor model/embedding.weight chunk [0, 0]" in out
    assert "damaged (1 problem)" in out
    (directory / "step_00000012" / "COMMIT").write_bytes(b"")
    assert main(["verify", str(directory)]) == 1, "the newest is damaged, not the one before it"
    assert main(["verify", str(directory / "step_00000001")]) == 0


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_mistake_is_told_in_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path / "nothing")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mcore-ckpt: no committed checkpoint at ")
    assert captured.err.count("\n") == 1


def test_a_reader_that_has_seen_enough(directory: Path) -> None:
    """`mcore-ckpt inspect … | head -1` says nothing of broken pipes."""
    code = "from mcore_ckpt.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, "inspect", str(directory)],
            stdout=writing, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_interrupted(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends a command in one line, and leaves nothing that could be taken for its result."""

    def read(*_: object, **__: object) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(mcore_ckpt.Checkpoint, "read", read)
    assert main(["reshard", str(directory), str(directory / "new")]) == 130
    assert capsys.readouterr().err.count("\n") == 1
    assert not list((directory / "new").iterdir())


def test_help_is_quick() -> None:
    """The command line and its commands import neither torch nor tensorstore."""
    code = (
        "import sys, types, importlib.util\n"
        "package = types.ModuleType('mcore_ckpt')\n"  # without what the package itself imports
        "package.__path__ = importlib.util.find_spec('mcore_ckpt').submodule_search_locations\n"
        "sys.modules['mcore_ckpt'] = package\n"
        "from mcore_ckpt.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules and 'tensorstore' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "inspect" in done.stdout
    assert "verify" in done.stdout
