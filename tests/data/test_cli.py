import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mcore_data import IndexedReader
from mcore_data.cli import main
from mcore_data.draw import draw_lengths


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


@pytest.fixture
def corpora(tmp_path):
    """Two files of bytes: `a` with 30 documents, `b` with 10; each ends with EOD."""
    from mcore_data import ByteTokenizer, preprocess

    for name, count in (("a", 30), ("b", 10)):
        preprocess(
            documents=[f"{name}{i} " * (i % 5 + 1) for i in range(count)],
            tokenizer=ByteTokenizer(),
            output=tmp_path / name,
            append_eod=True,
        )
    return tmp_path


def test_lengths_of_documents_as_a_picture(corpora, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    a, b, png = (str(corpora / name) for name in ("a", "b", "pictures/p.png"))
    command = ["plan", a, b, "--seq-length", "8", "--png", png]
    assert main(command) == 0
    assert Path(png).read_bytes().startswith(b"\x89PNG")
    assert "together" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no document of x has a token"):
        draw_lengths({"x": np.zeros(3, int)}, png, seq_length=8)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(command) == 2
    assert "a PNG needs matplotlib: pip install" in capsys.readouterr().err


def test_verify_merge_and_split(corpora, capsys):
    a, b, c = (str(corpora / name) for name in "abc")
    assert main(["merge", a, b, "--output", c]) == 0
    assert capsys.readouterr().out.startswith(f"{c}: 40 documents, ")
    assert main(["verify", a, b, c, "--vocab-size", "257"]) == 0
    out = capsys.readouterr().out
    assert out.count(", ok\n") == 3
    assert main(["split", c, "--weights", "30,10", "--output", str(corpora / "p")]) == 0
    assert capsys.readouterr().out == f"{corpora}/p_0: 30 documents\n{corpora}/p_1: 10 documents\n"
    for part, whole in (("p_0", "a"), ("p_1", "b")):
        for suffix in (".bin", ".idx"):
            ours = (corpora / f"{part}{suffix}").read_bytes()
            assert ours == (corpora / f"{whole}{suffix}").read_bytes()


def test_plan(corpora, capsys):
    a, b = str(corpora / "a"), str(corpora / "b")
    options = ["--seq-length", "8", "--train", "40", "--validation", "2", "--test", "0"]
    assert main(["plan", "3", a, "1", b, "--split", "8,2", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["part", "documents", "tokens", "samples", "epochs", "file"]
    assert [line.split()[0] for line in lines[1:]] == ["train"] * 2 + ["32"] + (
        ["validation"] * 2 + ["8"]
    )
    assert lines[1].split()[1:4:2] == ["24", "30"]
    assert lines[1].split()[5] == a
    assert lines[3].split()[2:] == ["40", lines[3].split()[3], "together"]
    (corpora / "parts.json").write_text(json.dumps({"train": [a], "valid": [a, b]}))
    command = ["plan", "--parts", str(corpora / "parts.json"), "--seq-length", "8", "--json"]
    assert main([*command, "--each-validation"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["part"] for row in rows] == ["train", "validation/a", "validation/b"]
    assert all(row["epochs"] <= 1 for row in rows)
    # What json holds for a source is what the reader says of it.
    assert rows[0]["tokens"] == IndexedReader(a).num_tokens


def test_show(corpora, capsys):
    command = ["show", str(corpora / "a"), "--sample", "2", "--seq-length", "12"]
    assert main([*command, "--tokenizer", "byte", "--reset-attention", "--mask-eod-loss"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"{corpora}/a: sample 2 of ")
    assert len(out) == 2 + 12
    rows = [line.split(maxsplit=6) for line in out[2:]]
    assert [int(row[0]) for row in rows] == list(range(12))
    for row in rows:
        token = int(row[3])
        assert row[6] == repr("" if token == 256 else chr(token))
        assert int(row[5]) == (int(row[4]) != 256)
    ends = [i for i, row in enumerate(rows[:-1]) if row[3] == "256"]
    assert [int(row[1]) for row in rows] == [sum(end < i for end in ends) for i in range(12)]
    assert main([*command, "--color", "always"]) == 0
    painted = capsys.readouterr().out.splitlines()
    assert painted[2].startswith("\x1b[36m")
    assert painted[2].endswith("\x1b[0m")
    assert main([*command, "--json", "--tokenizer", "byte"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tokens"] == [int(row[3]) for row in rows]
    assert shown["cu_seqlens"] == [0, 12]


def test_bench(capsys, monkeypatch):
    small = ["bench", "--documents", "2000", "--tokens", "5e5", "--seq-length", "1024"]
    monkeypatch.setattr("mcore_data.datasets.compiled.available", lambda: False)
    assert main([*small, "--repeats", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    index, loader = rows["index"], rows["loader"]
    assert set(index) - {"megatron-core"} == {"numpy"}
    assert index["numpy"]["seconds"] > 0
    assert all(row.get("identical", True) for row in index.values())
    # Long samples are read at 40 M tokens per second; the machine may be busy.
    assert loader["mcore-data"]["tokens_per_second"] > 1e6
    assert main([*small[:3], "--tokens", "inf"]) == 2
    assert "--tokens is inf, it must be a finite number" in capsys.readouterr().err
    assert main([*small, "--repeats", "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plan --seq-length 8", "give either files or --parts JSON"),
        ("plan DIR/d --parts DIR/x --seq-length 8", "give either files or --parts JSON"),
        ("plan --parts DIR/x.jsonl --split 1 --seq-length 8", "--split does not go with --parts"),
        ("plan DIR/d --seq-length 0", "seq_length=0 must be at least 1"),
        ("plan DIR/d --seq-length 8 --train -1", "train=-1 samples: give 0 to leave the part out"),
        ("plan 1 DIR/d 2 --seq-length 8", "the last weight of the blend, 2, has no file"),
        ("plan 1 DIR/d 1 DIR/d --seq-length 8", "a blend by weights needs a number of samples"),
        ("verify DIR/d --vocab-size 3", "token 120 at position 0 of sequence 0"),
        ("verify DIR/x", "DIR/x.idx: no such file"),
        ("merge DIR/d --output DIR/d", "it is one of the files to merge"),
        ("split DIR/d --weights 1,1 --output DIR/p", "DIR/p_0 would get none of the 1 documents"),
        ("split DIR/d --weights 1,a --output DIR/p", "--weights is '1,a'"),
        ("show DIR/d --sample 3 --seq-length 2", "hold no sample of seq_length 2"),
        ("show DIR/d --seq-length 2 --mask-eod-loss", "mask_eod_loss needs eod_id"),
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
