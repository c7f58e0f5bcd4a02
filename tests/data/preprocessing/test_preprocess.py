import gzip
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from mcore_data import (
    ByteTokenizer,
    IndexedReader,
    NullTokenizer,
    Tokenizer,
    load_tokenizer,
    preprocess,
)
from mcore_data.preprocessing.sources import expand_inputs


class Words(Tokenizer):
    """One id per known word, EOD 0; none for anything else."""

    vocab_size, bos_id, eos_id, eod_id, pad_id, unk_id = 10, None, None, 0, None, None

    def encode(self, text):
        return [int(word) for word in text.split() if word.isdigit()]

    def decode(self, ids):
        return " ".join(map(str, ids))

    def save(self, directory):
        raise NotImplementedError


BYTE = ByteTokenizer()


def lines(path, *values):
    text = "".join(json.dumps(v) + "\n" if not isinstance(v, str) else v + "\n" for v in values)
    path.write_text(text)
    return path


def documents(prefix, tokenizer=BYTE):
    reader = IndexedReader(prefix)
    reader.verify()
    return [tokenizer.decode(tokens) for tokens in reader]


def test_eod_counts_in_the_lengths(tmp_path):
    """U08: the recorded lengths and document bounds include the EOD."""
    report = preprocess(
        documents=["5 6", "7"], tokenizer=Words(), output=tmp_path / "c", append_eod=True
    )
    reader = IndexedReader(tmp_path / "c")
    assert reader.lengths.tolist() == [3, 2]
    assert np.fromfile(tmp_path / "c.bin", "<u2").tolist() == [5, 6, 0, 7, 0]
    assert reader.offsets.tolist() == [0, 6]
    assert reader.document_indices.tolist() == [0, 1, 2]
    assert reader[1].tolist() == [7, 0]
    assert (report.documents, report.tokens) == (2, 5)
    preprocess(documents=["5 6", "7"], tokenizer=Words(), output=tmp_path / "d")
    assert IndexedReader(tmp_path / "d").lengths.tolist() == [2, 1]


@pytest.mark.parametrize("append_eod", [True, False])
@pytest.mark.parametrize("texts", [["", "a b"], ["a b", ""], ["", "", "a b", "", "c"], ["\n", ""]])
def test_empty_documents_are_left_out_and_counted(tmp_path, texts, append_eod):
    """U07: an empty text is no document, wherever it stands; the others are whole."""
    path = lines(tmp_path / "x.jsonl", *[{"text": text} for text in texts])
    report = preprocess(
        [path], tokenizer=BYTE, output=tmp_path / "c", append_eod=append_eod, strict=True
    )
    kept = [text for text in texts if text]
    assert documents(tmp_path / "c") == kept
    assert report.documents == len(kept)
    assert (report.empty, report.bad) == (len(texts) - len(kept), 0)
    lengths = IndexedReader(tmp_path / "c").lengths.tolist()
    assert lengths == [len(text) + append_eod for text in kept]


def test_texts_without_a_token_are_empty_too(tmp_path):
    report = preprocess(documents=["x", "1", ""], tokenizer=Words(), output=tmp_path / "c")
    assert (report.documents, report.empty) == (1, 2)


def corpus(folder):
    rng = np.random.default_rng(0)
    (folder / "deep").mkdir()
    lines(
        folder / "b.jsonl",
        *[{"text": f"line {i} " * int(rng.integers(1, 900))} for i in range(300)],
    )
    with gzip.open(folder / "c.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps({"text": f"zip {i}"}) for i in range(20)))
    (folder / "a.txt").write_text("first\nfile\n")
    with gzip.open(folder / "deep" / "z.txt.gz", "wt") as file:
        file.write("zipped text")
    for i in range(40):
        (folder / "deep" / f"{i:02d}.py").write_text(f"x = {i}\n" * int(rng.integers(1, 9000)))
    (folder / ".hidden").write_text("no")
    return folder


def test_workers_do_not_change_the_result(tmp_path, sentencepiece_dir):
    (tmp_path / "in").mkdir()
    folder = corpus(tmp_path / "in")
    tokenizer = load_tokenizer(sentencepiece_dir)
    reports = [
        preprocess(
            [folder],
            tokenizer=tokenizer,
            output=tmp_path / f"w{workers}",
            append_eod=True,
            workers=workers,
        )
        for workers in (1, 2)
    ]
    assert reports[0].documents == reports[1].documents == 1 + 300 + 20 + 41
    for suffix in (".bin", ".idx"):
        one, two = ((tmp_path / f"w{w}{suffix}").read_bytes() for w in (1, 2))
        assert one == two
    found = documents(tmp_path / "w2", tokenizer)
    assert found[0] == "first\nfile\n"
    assert found[1].startswith("line 0 ")
    assert found[301] == "zip 0"
    assert [text.split("\n")[0] for text in found[321:361]] == [f"x = {i}" for i in range(40)]
    assert found[-1] == "zipped text"


def test_inputs_are_files_folders_and_patterns(tmp_path):
    (tmp_path / "in").mkdir()
    folder = corpus(tmp_path / "in")
    names = [p.relative_to(folder).as_posix() for p in expand_inputs([folder])]
    assert names[:4] == ["a.txt", "b.jsonl", "c.jsonl.gz", "deep/00.py"]
    assert ".hidden" not in names
    assert len(expand_inputs([f"{folder}/**/*.py"])) == 40
    assert len(expand_inputs([folder / "a.txt", f"{folder}/deep/0?.py"])) == 11
    (folder / "[odd].txt").write_text("x")
    assert expand_inputs([f"{folder}/[odd].txt"]) == [folder / "[odd].txt"]
    (folder / "nothing").mkdir()
    for bad in ("absent.txt", "*.rst", "nothing"):
        with pytest.raises(ValueError, match="no such file, folder with files, or pattern"):
            expand_inputs([f"{folder}/{bad}"])
    (folder / "x.bz2").write_bytes(b"BZh")
    with pytest.raises(ValueError, match=r"x.bz2: .bz2 files are not read"):
        expand_inputs([folder / "x.bz2"])


BAD = {
    '{"text": "cut': r"x.jsonl:2: no JSON, Unterminated string starting at character 9",
    '["text"]': r"x.jsonl:2: a JSON list, not an object",
    '{"body": "x", "id": 1}': r"x.jsonl:2: no key 'text'; keys are 'body', 'id'",
    '{"text": null}': r"x.jsonl:2: 'text' is a NoneType, not a string",
    "[" * 100_000: r"x.jsonl:2: no JSON that can be read, it is nested too deep",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_lines_are_counted_and_named(tmp_path, line):
    path = lines(tmp_path / "x.jsonl", {"text": "a"}, line, {"text": "b"}, "   ", line)
    report = preprocess([path], tokenizer=BYTE, output=tmp_path / "c")
    assert documents(tmp_path / "c") == ["a", "b"]
    assert report.bad == 2
    assert report.bad_lines[0].endswith(BAD[line])
    assert ":5: " in report.bad_lines[1]
    before = (tmp_path / "c.idx").read_bytes()
    lines(path, {"text": "other"}, line)
    with pytest.raises(ValueError, match=r"x.jsonl:2: ") as caught:
        preprocess([path], tokenizer=BYTE, output=tmp_path / "c", strict=True)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "c.idx").read_bytes() == before
    assert documents(tmp_path / "c") == ["a", "b"]


def test_many_bad_lines_are_counted_but_not_all_quoted(tmp_path):
    path = lines(tmp_path / "x.jsonl", {"text": "a"}, *["{"] * 500)
    report = preprocess([path], tokenizer=BYTE, output=tmp_path / "c")
    assert (report.bad, len(report.bad_lines)) == (500, 20)


def test_odd_encodings(tmp_path):
    (tmp_path / "in").mkdir()
    for name, raw in (
        ("1-bom.txt", b"\xef\xbb\xbfmark"),
        ("2-latin.txt", "caf\u00e9".encode("latin-1")),
        ("3-crlf.txt", b"a\r\nb\r"),
        ("4-utf16.txt", "text".encode("utf-16")),
        ("5-long.txt", b"y" * 3_000_000),
        ("6-empty.txt", b""),
    ):
        (tmp_path / "in" / name).write_bytes(raw)
    report = preprocess([tmp_path / "in"], tokenizer=BYTE, output=tmp_path / "c")
    found = documents(tmp_path / "c")
    assert found[:3] == ["mark", "caf\ufffd", "a\r\nb\r"]
    assert found[3] == "y" * 3_000_000
    assert (report.documents, report.repaired, report.empty, report.bad) == (4, 1, 1, 1)
    assert report.bad_lines[0].endswith("4-utf16.txt: no text, byte 3 is NUL")
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "a"}\n{"text": "\xff"}\r\n{"text": "b\\ud83dc"}\n'
        b'{"text": "\\ud83d\\ude00"}'
    )
    report = preprocess([path], tokenizer=BYTE, output=tmp_path / "d")
    assert documents(tmp_path / "d") == ["a", "b\ufffdc", "\U0001f600"]
    assert (report.repaired, report.bad) == (1, 1)
    assert report.bad_lines[0].endswith("x.jsonl:2: no UTF-8 at byte 10")


def test_several_keys_go_to_files_of_their_own(tmp_path):
    path = lines(
        tmp_path / "x.jsonl",
        {"title": "t1", "body": "b1"},
        {"title": "", "body": "b2"},
        {"title": "t3"},
    )
    report = preprocess([path], tokenizer=BYTE, output=tmp_path / "c", keys=("title", "body"))
    assert documents(tmp_path / "c_title") == ["t1"]
    assert documents(tmp_path / "c_body") == ["b1", "b2"]
    assert report.outputs == (tmp_path / "c_title", tmp_path / "c_body")
    assert (report.documents, report.empty, report.bad) == (3, 1, 1)
    (tmp_path / "y.txt").write_text("text")
    with pytest.raises(ValueError, match=r"y.txt: 2 keys for a text file"):
        preprocess([tmp_path / "y.txt"], tokenizer=BYTE, output=tmp_path / "c", keys=("a", "b"))


def test_vocabulary_decides_the_dtype(tmp_path):
    class Wide(Words):
        vocab_size = 65_500

        def encode(self, text):
            return [65_499]

    preprocess(documents=["x"], tokenizer=Wide(), output=tmp_path / "c")
    reader = IndexedReader(tmp_path / "c")
    assert reader.dtype == np.int32
    assert reader[0].tolist() == [65_499]


def test_faults_leave_nothing_behind(tmp_path):
    out = tmp_path / "out" / "c"
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 9999)[:-9])
    (tmp_path / "empty.jsonl").write_text("")

    class NoEnd(Words):
        eod_id = None

    for options, message in (
        ({"documents": ["x", ""]}, r"no document to write \(2 empty, 0 bad\)"),
        ({"documents": []}, "no document to write"),
        ({"inputs": [tmp_path / "empty.jsonl"]}, "no document to write"),
        ({"inputs": [tmp_path / "cut.jsonl.gz"]}, r"cut.jsonl.gz:\d+: damaged .gz file"),
        ({"inputs": [tmp_path / "absent"]}, "absent: no such file"),
        ({"inputs": ["x"], "documents": ["x"]}, "either inputs .* or documents"),
        ({}, "either inputs .* or documents"),
        ({"documents": ["x"], "keys": ("a", "b")}, "2 keys for documents given as text"),
        ({"documents": ["x"], "workers": 0}, "0 workers, the least is 1"),
        ({"inputs": [tmp_path], "keys": ("a", "a")}, "key 'a' is given twice, its documents would"),
        ({"documents": ["x"], "keys": ()}, "no keys, at least one is needed"),
        (
            {"documents": ["x"], "tokenizer": NoEnd(), "append_eod": True},
            "append_eod needs a tokenizer with an EOD id",
        ),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            preprocess(**{"tokenizer": Words(), "output": out, **options})
        assert "\n" not in str(caught.value)
        assert not out.parent.exists() or not list(out.parent.iterdir())


def test_a_file_that_cannot_be_read_is_no_bad_line(tmp_path):
    path = tmp_path / "cut.txt.gz"
    path.write_bytes(gzip.compress(b"text" * 99)[:-9])
    with pytest.raises(ValueError, match=r"cut.txt.gz: damaged .gz file"):
        preprocess([path], tokenizer=BYTE, output=tmp_path / "c")


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    peaks = []
    for count in (200, 1000):
        texts = ("0123456789" * 1000 for _ in range(count))
        tracemalloc.start()
        preprocess(documents=texts, tokenizer=BYTE, output=tmp_path / "c")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (tmp_path / "c.bin").stat().st_size == 2 * 10_000_000
    assert peaks[1] < 1.3 * peaks[0]


def test_a_single_path_is_not_taken_for_its_characters(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for single in (tmp_path / "a.txt", str(tmp_path / "a.txt")):
        preprocess(single, tokenizer=BYTE, output=tmp_path / "c")
        assert documents(tmp_path / "c") == ["text"]
    assert Path(f"{tmp_path}/c.idx").exists()


def test_what_the_tokenizer_refuses_is_a_bad_document(tmp_path):
    """The others of its task are whole."""
    path = lines(tmp_path / "x.jsonl", {"text": "1 2"}, {"text": "1 x"}, {"text": "3"})
    report = preprocess([path], tokenizer=NullTokenizer(10), output=tmp_path / "c")
    assert [t.tolist() for t in IndexedReader(tmp_path / "c")] == [[1, 2], [3]]
    assert report.bad_lines == (f"{path}:2: 'x' at character 2 is no id from 0 to 9",)


def test_a_document_too_long_for_the_format_is_bad(tmp_path, monkeypatch):
    """The limit is 2**31 - 1 tokens; here 9, to have such a document at all."""
    monkeypatch.setattr("mcore_data.preprocessing.encode.MAX_LENGTH", 9)
    path = lines(tmp_path / "x.jsonl", {"text": "123456789"}, {"text": "1234567890"})
    report = preprocess([path], tokenizer=BYTE, output=tmp_path / "c")
    assert report.bad_lines == (f"{path}:2: a document of 10 tokens, the format holds 9",)
    with pytest.raises(ValueError, match=r"x.jsonl:1: a document of 10 tokens, the format holds 9"):
        preprocess([path], tokenizer=BYTE, output=tmp_path / "c", strict=True, append_eod=True)
