import builtins
import gzip
import itertools
import json

import pytest

from mcore_data import ByteTokenizer, IndexedReader, Tokenizer, preprocess
from mcore_data.cli import main
from mcore_data.indexed import merge
from mcore_data.preprocessing import resume, sources

BYTE = ByteTokenizer()


def documents(prefix):
    reader = IndexedReader(prefix)
    reader.verify()
    return [BYTE.decode(tokens) for tokens in reader]


def jsonl(path, count, name="line"):
    path.write_text("".join(json.dumps({"text": f"{name} {i} " * 9}) + "\n" for i in range(count)))
    return path


def test_zstandard(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    plain = jsonl(tmp_path / "x.jsonl", 3000).read_bytes()
    pack = zstandard.ZstdCompressor().compress
    half = len(plain) // 2
    frames = pack(plain[:half]) + pack(plain[half:])  # as `cat a.zst b.zst` makes them
    (tmp_path / "y.jsonl.zst").write_bytes(frames)
    (tmp_path / "z.txt.zst").write_bytes(pack(b"a text"))
    preprocess([tmp_path / "x.jsonl"], tokenizer=BYTE, output=tmp_path / "c")
    preprocess([tmp_path / "y.jsonl.zst"], tokenizer=BYTE, output=tmp_path / "d", workers=2)
    assert (tmp_path / "c.bin").read_bytes() == (tmp_path / "d.bin").read_bytes()
    preprocess([tmp_path / "z.txt.zst"], tokenizer=BYTE, output=tmp_path / "e")
    assert documents(tmp_path / "e") == ["a text"]
    for raw, message in (
        (frames[:-5], r"y.jsonl.zst:\d+: damaged .zst file \(it ends within a frame\)"),
        (b"no zstandard", r"y.jsonl.zst:1: damaged .zst file \("),
        (frames + b"tail", r"y.jsonl.zst:\d+: damaged .zst file \("),
    ):
        (tmp_path / "y.jsonl.zst").write_bytes(raw)
        with pytest.raises(ValueError, match=message):
            preprocess([tmp_path / "y.jsonl.zst"], tokenizer=BYTE, output=tmp_path / "d")


def test_parquet(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(sources, "_TASK_BYTES", 2000)
    texts = [f"row {i} " * (i % 7 + 1) for i in range(500)]
    columns = {"text": [*texts, None, ""], "other": ["o"] * 502, "number": [1] * 502}
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table(columns), path, row_group_size=200)
    report = preprocess([path], tokenizer=BYTE, output=tmp_path / "c")
    assert documents(tmp_path / "c") == texts
    assert (report.bad, report.empty) == (1, 1)
    assert report.bad_lines == (f"{path}: row 500: 'text' is null",)
    preprocess([path], tokenizer=BYTE, output=tmp_path / "d", keys=("text", "other"))
    assert documents(tmp_path / "d_text") == texts
    assert documents(tmp_path / "d_other") == ["o"] * 501
    for key, message in (
        ("body", r"x.parquet: no column 'body'; columns are 'text', 'other', 'number'"),
        ("number", r"x.parquet: column 'number' holds int64, not text"),
    ):
        with pytest.raises(ValueError, match=message):
            preprocess([path], tokenizer=BYTE, output=tmp_path / "c", keys=(key,))
    broken = tmp_path / "y.parquet"
    raw = pyarrow.array([b"good", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": raw}), broken)
    with pytest.raises(ValueError, match=r"y.parquet: rows 0 to 1: no UTF-8 \("):
        preprocess([broken], tokenizer=BYTE, output=tmp_path / "c")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"x.parquet: damaged Parquet file") as caught:
        preprocess([path], tokenizer=BYTE, output=tmp_path / "c")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [("x.parquet", "pyarrow", "parquet"), ("x.jsonl.zst", "zstandard", "zstd")],
)
def test_missing_libraries_are_named(tmp_path, monkeypatch, name, library, extra):
    real = builtins.__import__

    def absent(module, *args, **options):
        if module.partition(".")[0] == library:
            raise ImportError(module)
        return real(module, *args, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    (tmp_path / name).write_bytes(b"x")
    message = rf"{name}: reading it needs {library}: pip install 'mcore-data\[{extra}\]'"
    with pytest.raises(ValueError, match=message):
        preprocess([tmp_path / name], tokenizer=BYTE, output=tmp_path / "c")


def test_partitions_share_the_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_TASK_BYTES", 1000)
    files = [jsonl(tmp_path / f"{k}.jsonl", 60, f"file {k}") for k in range(3)]
    for i in range(12):
        (tmp_path / f"t{i:02d}.txt").write_text(f"text {i} " * 50)
    inputs = [*files, f"{tmp_path}/*.txt"]
    preprocess(inputs, tokenizer=BYTE, output=tmp_path / "all")
    parts = []
    for i in range(3):
        preprocess(inputs, tokenizer=BYTE, output=tmp_path / f"p{i}", partition=(i, 3))
        parts.append(documents(tmp_path / f"p{i}"))
    everything = documents(tmp_path / "all")
    assert sorted(itertools.chain(*parts)) == sorted(everything)
    sizes = [sum(map(len, part)) for part in parts]
    assert max(sizes) - min(sizes) < 0.25 * max(sizes)
    merge([tmp_path / f"p{i}" for i in range(3)], tmp_path / "merged")
    assert sorted(documents(tmp_path / "merged")) == sorted(everything)
    with pytest.raises(ValueError, match="partition 3 of 3: it must lie in 0 to 2"):
        preprocess(inputs, tokenizer=BYTE, output=tmp_path / "p", partition=(3, 3))


class Counting(Tokenizer):
    """Bytes, counting the documents; fails after a number of them."""

    vocab_size, bos_id, eos_id, eod_id, pad_id, unk_id = 257, None, 256, 256, None, None

    def __init__(self, stop=None):
        self.stop, self.seen = stop, 0

    def encode(self, text):
        self.seen += 1
        if self.seen == self.stop:
            raise KeyboardInterrupt
        return list(text.encode())

    def save(self, directory):
        ByteTokenizer().save(directory)


def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_TASK_BYTES", 1000)
    monkeypatch.setattr(resume, "PART_TASKS", 4)
    path = jsonl(tmp_path / "x.jsonl", 300)
    with open(path, "a") as file:
        file.write("nonsense\n")
    out = tmp_path / "out" / "c"
    options = {"append_eod": True, "progress": False}
    whole = preprocess([path], tokenizer=BYTE, output=tmp_path / "whole", **options)
    first = Counting(stop=200)
    with pytest.raises(KeyboardInterrupt):
        preprocess([path], tokenizer=first, output=out, resume=True, **options)
    assert sorted(p.name for p in out.parent.iterdir()) == [".c.parts"]
    with pytest.raises(ValueError, match=r"\.c\.parts is left from a run with other inputs"):
        preprocess([path], tokenizer=BYTE, output=out, resume=True, progress=False)
    second = Counting()
    report = preprocess([path], tokenizer=second, output=out, resume=True, **options)
    assert 100 <= second.seen < 160  # of 300: the rest was kept
    assert sorted(p.name for p in out.parent.iterdir()) == ["c.bin", "c.idx"]
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"whole{suffix}").read_bytes() == (
            out.with_name(f"c{suffix}").read_bytes()
        )
    assert (report.documents, report.tokens) == (whole.documents, whole.tokens)
    assert (
        report.bad_lines
        == whole.bad_lines
        == (f"{path}:301: no JSON, Expecting value at character 0",)
    )


def test_what_cannot_be_resumed(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", 3)
    with pytest.raises(ValueError, match=r"resume needs inputs \(files\)"):
        preprocess(documents=["x"], tokenizer=BYTE, output=tmp_path / "c", resume=True)
    folder = tmp_path / ".c.parts"
    folder.mkdir()
    message = r"another process is at work in .*\.c\.parts"
    with resume._claimed(folder), pytest.raises(ValueError, match=message):
        preprocess([path], tokenizer=BYTE, output=tmp_path / "c", resume=True)
    (folder / "000000.json").write_text("{")
    with pytest.raises(ValueError, match=r"000000.json: damaged \(.*; remove .*\.c\.parts"):
        preprocess([path], tokenizer=BYTE, output=tmp_path / "c", resume=True)
    for other in ("{}", "[]"):
        (folder / "000000.json").write_text(other)
        with pytest.raises(ValueError, match=r"\.c\.parts is left from a run with other inputs"):
            preprocess([path], tokenizer=BYTE, output=tmp_path / "c", resume=True)


def test_command(tmp_path, capsys):
    with gzip.open(tmp_path / "x.jsonl.gz", "wt") as file:
        file.write('{"text": "a"}\n' * 10)
    prefix = str(tmp_path / "c")
    options = ["--tokenizer", "byte", "--output", prefix, "--workers", "1"]
    command = ["preprocess", str(tmp_path / "x.jsonl.gz"), *options]
    assert main([*command, "--resume", "--partition", "1/1"]) == 0
    assert "10 documents, 10 tokens" in capsys.readouterr().out
    for text in ("2/1", "0/3", "1", "a/b"):
        assert main([*command, "--partition", text]) == 2
        assert "--partition is " in capsys.readouterr().err
