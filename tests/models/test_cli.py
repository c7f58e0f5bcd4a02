import json

import pytest

from mcore_models import model_shape, preset
from mcore_models.cli import main
from mcore_parallel.cost.files import shape_from_json


def test_presets_are_listed_with_their_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["llama-3-8b", "8,030,261,248"] for line in lines)


def test_one_preset_in_detail(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "llama3-8b-8layers", "--seq-length", "8192"]) == 0
    out = capsys.readouterr().out
    assert "2,795,573,248" in out
    assert "per token of 8192" in out


def test_what_a_token_uses_of_a_mixture_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "mixtral-8x7b"]) == 0
    out = capsys.readouterr().out
    assert "12,879,925,248" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["moe.num_experts", "8"] in lines
    assert not any(line[0].startswith(("attention.", "moe.shared_gate")) for line in lines)


def test_a_shape_is_what_planning_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shape", "mixtral-8x7b"]) == 0
    read = shape_from_json(json.loads(capsys.readouterr().out))
    assert read == model_shape(preset("mixtral-8x7b"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["show", "llama3"], "did you mean"),
        (["show", "gpt2", "--seq-length", "0"], "--seq-length=0"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("mcore-models: ")
    assert err.count("\n") == 1
    assert words in err
