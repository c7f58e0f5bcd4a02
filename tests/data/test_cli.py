import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_data import IndexedReader
from mcore_data.cli import main


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "hello"}\n{"text": ""}\nnonsense\n{"text": "world!"}\n')
    return path


def test_preprocess_and_inspect(tmp_path, text, capsys):
    prefix = str(tmp_path / "c")
    options = ["--tokenizer", "byte", "--output", prefix, "--append-eod", "--workers", "1"]
    assert main(["preprocess", str(text), *options]) == 0
    out, err = capsys.readouterr()
    assert f"{prefix}.bin/.idx: 2 documents, 13 tokens" in out
    assert "left out: 1 empty, 1 bad; repaired: 0" in out
    assert err == f"mcore-data: skipped {text}:3: no JSON, Expecting value at character 0\n"
    assert IndexedReader(prefix).lengths.tolist() == [6, 7]

    assert main(["inspect", prefix]) == 0
    assert "tokens     13\n" in capsys.readouterr().out
    assert main(["inspect", prefix, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary == {
        "prefix": prefix,
        "dtype": "uint16",
        "documents": 2,
        "sequences": 2,
        "tokens": 13,
        "bin_bytes": 26,
        "multimodal": False,
        "shortest": 6,
        "median": 6.5,
        "mean": 6.5,
        "longest": 7,
    }
    assert main(["inspect", prefix, "--document", "0"]) == 0
    assert capsys.readouterr().out.endswith("document 0, 6 tokens:\n104 101 108 108 111 256\n")
    show = ["inspect", prefix, "--document", "1", "--tokenizer", "byte"]
    assert main(show) == 0
    assert capsys.readouterr().out.endswith("document 1, 7 tokens:\nworld!\n")
    assert main([*show, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["text"], shown["document"][-1]) == ("world!", 256)


def test_train_tokenizer_then_use_it(tmp_path, capsys):
    tests = str(Path(__file__).parent / "**" / "*.py")
    where = str(tmp_path / "tok")
    assert main(["train-tokenizer", tests, "--output", where, "--vocab-size", "400"]) == 0
    assert f"{where}: sentencepiece, 400 pieces" in capsys.readouterr().out
    prefix = str(tmp_path / "c")
    options = ["--tokenizer", where, "--output", prefix, "--workers", "2"]
    assert main(["preprocess", tests, *options]) == 0
    capsys.readouterr()
    assert main(["inspect", prefix, "--document", "0", "--tokenizer", where, "--json"]) == 0
    first = sorted(Path(__file__).parent.rglob("*.py"), key=str)[0]
    assert json.loads(capsys.readouterr().out)["text"] == first.read_text()


def test_several_keys(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text('{"a": "1", "b": "22"}\n')
    prefix = str(tmp_path / "c")
    options = ["--tokenizer", "byte", "--output", prefix, "--workers", "1"]
    keys = ["--key", "a", "--key", "b"]
    assert main(["preprocess", str(tmp_path / "x.jsonl"), *options, *keys]) == 0
    assert f"{prefix}_a.bin/.idx, {prefix}_b.bin/.idx: 2 documents" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("preprocess DIR/no.txt --tokenizer byte --output DIR/c", "DIR/no.txt: no such file"),
        ("preprocess DIR/x.jsonl --tokenizer DIR/t --output DIR/c", "DIR/t: no tokenizer"),
        (
            "preprocess DIR/x.jsonl --tokenizer byte --output DIR/c --strict --workers 1",
            "DIR/x.jsonl:3: no JSON",
        ),
        (
            "preprocess DIR/x.jsonl --tokenizer byte --output DIR/x.jsonl/c --workers 1",
            "Not a directory|File exists",
        ),
        ("inspect DIR", "DIR is a directory; give the prefix"),
        ("inspect DIR/c", "DIR/c.idx: no such file"),
        ("inspect DIR/d --tokenizer byte", "--tokenizer needs --document I"),
        ("inspect DIR/d --document 5", "DIR/d: document 5 of 1"),
        ("train-tokenizer DIR/x.jsonl --output DIR/t", "vocab_size 4096 is more than the text"),
        ("train-tokenizer DIR/x.jsonl --output DIR/x.jsonl --vocab-size 268", "x.jsonl is a file"),
    ],
)
def test_faults_are_one_line_and_status_2(tmp_path, text, capsys, command, message):
    from mcore_data import ByteTokenizer, preprocess

    preprocess(documents=["x"], tokenizer=ByteTokenizer(), output=tmp_path / "d")
    assert main(command.replace("DIR", str(tmp_path)).split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mcore-data: ")
    assert err.count("\n") == 1
    import re

    assert re.search(message.replace("DIR", str(tmp_path)), err)


def test_usage_errors(capsys):
    for command in ([], ["preprocess"], ["train-tokenizer", "x", "--output", "y", "--kind", "z"]):
        with pytest.raises(SystemExit) as stop:
            main(command)
        assert stop.value.code == 2
    assert "invalid choice: 'z'" in capsys.readouterr().err


def test_the_module_runs():
    run = [sys.executable, "-m", "mcore_data.cli", "inspect", "/nonexistent/c"]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "mcore-data: /nonexistent/c.idx: no such file\n"
