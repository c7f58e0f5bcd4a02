"""Whatever is wrong with a file: one line that names it and the place, and a status to match."""

import io
import json
import os
import re
import struct
import subprocess
import sys
import tarfile

import numpy as np
import pytest

from mcore_data import ByteTokenizer, preprocess
from mcore_data.cli import main
from mcore_data.indexed import IndexedWriter, build_index

LINE = '{"text": "some text"}\n'


def tar(path, *members):
    with tarfile.open(path, "w") as archive:
        for name, raw in members:
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))


@pytest.fixture
def folder(tmp_path):
    """A corpus `c` of 3 documents, 9, 4 and 5 tokens; `x.jsonl`; a tokenizer; a template."""
    preprocess(
        documents=["some text", "four", "fives"], tokenizer=ByteTokenizer(), output=tmp_path / "c"
    )
    (tmp_path / "x.jsonl").write_text(LINE * 3)
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "q"}]}\n' * 2)
    ByteTokenizer().save(tmp_path / "t")
    return tmp_path


def cut(name, size):
    return lambda folder: os.truncate(folder / name, size)


def patch(name, place, raw):
    def change(folder):
        with open(folder / name, "r+b") as file:
            file.seek(place)
            file.write(raw)

    return change


def written(name, content):
    return lambda folder: (folder / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def instead(name):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return change


def empty_corpus(folder):
    (folder / "c.bin").write_bytes(b"")
    (folder / "c.idx").write_bytes(build_index(np.array([], np.int32), np.array([0]), "uint16"))


def other_dtype(folder):
    with IndexedWriter(folder / "d", "int32") as writer:
        writer.add_document([1])


def huge_claim(count):
    return patch("c.idx", 18, struct.pack("<Q", count))


def climbing_tar(folder):
    tar(folder / "x.tar", ("a.txt", b"x"), ("../../etc/x.png", b"x"))


PREPROCESS = "preprocess DIR/x.jsonl --tokenizer byte --output DIR/o --workers 1"
CHAT = "preprocess DIR/chat.jsonl --tokenizer byte --output DIR/o --workers 1 --chat DIR/t.jinja"
CASES = [
    # Truncated.
    (cut("c.idx", 0), "inspect DIR/c", "DIR/c.idx: starts with b'', an index starts with"),
    (cut("c.idx", 20), "verify DIR/c", "DIR/c.idx: truncated, 20 bytes and its header has 34"),
    (
        cut("c.idx", 60),
        "verify DIR/c",
        "DIR/c.idx: truncated, 60 bytes where 3 sequences and 3 doc",
    ),
    (cut("c.bin", 35), "inspect DIR/c", "DIR/c.bin: truncated, 35 bytes where the last of 3 seq"),
    (cut("c.bin", 0), "merge DIR/c --output DIR/o", "DIR/c.bin: truncated, 0 bytes where"),
    (cut("c.bin", 5), "split DIR/c --weights 1,1 --output DIR/o", "DIR/c.bin: truncated, 5 bytes"),
    (cut("c.bin", 9), "show DIR/c --sample 0 --seq-length 2", "DIR/c.bin: truncated, 9 bytes"),
    (cut("c.idx", 99), "plan DIR/c --seq-length 2", "DIR/c.idx: truncated, 99 bytes"),
    # JSON that is nested too deep to be read.
    (
        written("deep.json", "[" * 100_000),
        "plan --parts DIR/deep.json --seq-length 2",
        r"DIR/deep.json: no JSON \(maximum",
    ),
    (
        written("tekken.json", "[" * 100_000),
        "show DIR/c --tokenizer DIR/tekken.json",
        r"DIR/tekken.json: no JSON \(maximum",
    ),
    # No index, or not the one of this file.
    (written("c.idx", "text " * 40), "verify DIR/c", "DIR/c.idx: starts with b'text text'"),
    (
        patch("c.idx", 9, b"\x07"),
        "verify DIR/c",
        "DIR/c.idx: version 7, this reader knows version 1",
    ),
    (
        patch("c.idx", 17, b"\x63"),
        "verify DIR/c",
        "DIR/c.idx: dtype code 99, known codes are 1 to 8",
    ),
    (
        huge_claim(2**63),
        "verify DIR/c",
        "DIR/c.idx: truncated, 102 bytes where 9223372036854775808",
    ),
    (huge_claim(1), "verify DIR/c", "DIR/c.idx: too long, 102 bytes where 1 sequences"),
    (patch("c.idx", 26, bytes(8)), "verify DIR/c", "DIR/c.idx: document array of length 0"),
    (
        patch("c.idx", 34, b"\xff" * 4),
        "verify DIR/c",
        "DIR/c.idx: sequence 0 has a negative length",
    ),
    (patch("c.idx", 46, b"\x01"), "verify DIR/c", "DIR/c.idx: sequence 1 does not start where"),
    (written("c.bin", b"1" * 40), "verify DIR/c", "DIR/c.bin: 40 bytes where the 3 sequences"),
    # Another dtype than the file's.
    (patch("c.idx", 17, b"\x04"), "inspect DIR/c", "DIR/c.bin: truncated, 36 bytes where the last"),
    (
        patch("c.idx", 17, b"\x01"),
        "inspect DIR/c",
        "DIR/c.idx: sequence 1 does not start where the",
    ),
    (other_dtype, "merge DIR/c DIR/d --output DIR/o", "DIR/d holds int32, DIR/c holds uint16"),
    # A directory where a file should be, a file where a directory should be.
    (instead("c"), "verify DIR/e", "DIR/e.idx: no such file"),
    (instead("c.idx"), "verify DIR/c", "DIR/c.idx: it is a directory, no file"),
    (instead("c.bin"), "verify DIR/c", "DIR/c.bin: it is a directory, no file"),
    (
        None,
        "verify DIR",
        "DIR is a directory; give the prefix of a .bin/.idx pair, for example DIR/c",
    ),
    (
        instead("e"),
        "preprocess DIR/e --tokenizer byte --output DIR/o",
        "DIR/e: no such file, folder",
    ),
    (None, PREPROCESS.replace("byte", "DIR"), "DIR: no tokenizer, it has no tokenizer_config.json"),
    (instead("m.model"), PREPROCESS.replace("byte", "DIR/m.model"), "DIR/m.model: no tokenizer"),
    (None, PREPROCESS.replace("DIR/o", "DIR/x.jsonl/o"), "DIR/x.jsonl"),
    (instead("t.jinja"), CHAT, "DIR/t.jinja"),
    # Nothing there.
    (written("x.jsonl", ""), PREPROCESS, r"DIR/o: no document to write \(0 empty, 0 bad\)"),
    (written("x.jsonl", "\n \n"), PREPROCESS, r"DIR/o: no document to write \(0 empty, 0 bad\)"),
    (written("x.jsonl", '{"text": ""}\n'), PREPROCESS, r"DIR/o: no document to write \(1 empty"),
    (empty_corpus, "show DIR/c --sample 0 --seq-length 2", "DIR/c: "),
    (empty_corpus, "plan DIR/c --seq-length 2", "DIR/c: no document in any part"),
    (empty_corpus, "split DIR/c --weights 1,1 --output DIR/o", "none of the 0 documents of DIR/c"),
    # Lines and documents.
    (written("x.jsonl", LINE + "{"), f"{PREPROCESS} --strict", "DIR/x.jsonl:2: no JSON, Expecting"),
    (written("x.jsonl", LINE + "[" * 99_999), f"{PREPROCESS} --strict", "DIR/x.jsonl:2: no JSON"),
    (
        written("x.jsonl", '{"text": ' + "1" * 9999 + "}"),
        f"{PREPROCESS} --strict",
        "DIR/x.jsonl:1: no",
    ),
    (
        written("x.jsonl", b'{"text": "\xff"}'),
        f"{PREPROCESS} --strict",
        "DIR/x.jsonl:1: no UTF-8 at",
    ),
    (written("x.jsonl", LINE * 2), f"{PREPROCESS} --strict --key no", "DIR/x.jsonl:1: no key 'no'"),
    (
        written("x.jsonl.gz", b"\x1f\x8b\x08no"),
        PREPROCESS.replace("jsonl", "jsonl.gz"),
        "x.jsonl.gz:1: d",
    ),
    (
        written("x.zip", b"PK"),
        PREPROCESS.replace("jsonl", "zip"),
        "DIR/x.zip: .zip files are not read",
    ),
    # Templates: programs that fail, or do not end well.
    (
        written("t.jinja", "{{ raise_exception('no\nway') }}"),
        CHAT,
        "chat.jsonl:1: chat template: no way",
    ),
    (written("t.jinja", "{{ 1 / 0 }}"), CHAT, "DIR/chat.jsonl:1: chat template: division by zero"),
    (written("t.jinja", "{% for %}"), CHAT, "DIR/t.jinja: line 1: "),
    (
        written("t.jinja", "{{ ''.__class__.__mro__ }}"),
        CHAT,
        "chat.jsonl:1: chat template: access to",
    ),
    (written("t.jinja", b"\xff\xfe"), CHAT, "DIR/t.jinja: no UTF-8"),
    # Archives.
    (
        climbing_tar,
        "verify DIR/x.tar",
        "DIR/x.tar: member '../../etc/x.png' at byte 1024 leads out",
    ),
    (climbing_tar, PREPROCESS.replace("x.jsonl", "x.tar"), "DIR/x.tar: .tar files are not read"),
    (
        written("x.tar", "no tar" * 200),
        "verify DIR/x.tar",
        "DIR/x.tar: no tar file, a compressed or",
    ),
    (None, "verify DIR/x.tar", "DIR/x.tar: no such file or folder"),
]


@pytest.mark.parametrize(("change", "command", "message"), CASES, ids=[c[2][:50] for c in CASES])
def test_one_line_and_no_traceback(folder, capsys, change, command, message):
    if change is not None:
        change(folder)
    before = sorted(folder.rglob("*"))
    assert main(command.replace("DIR", str(folder)).split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mcore-data: ")
    assert err.count("\n") == 1
    assert re.search(message.replace("DIR", re.escape(str(folder))), err), err
    assert sorted(folder.rglob("*")) == before  # nothing half-written, nothing left behind


def test_a_document_longer_than_the_format_holds(folder, capsys, monkeypatch):
    """More than 2**31 - 1 tokens, simulated by a smaller limit: named, left out, others whole."""
    monkeypatch.setattr("mcore_data.preprocessing.encode.MAX_LENGTH", 20)
    (folder / "x.jsonl").write_text(LINE + json.dumps({"text": "x" * 21}) + "\n" + LINE)
    command = PREPROCESS.replace("DIR", str(folder)).split()
    assert main(command) == 0
    out, err = capsys.readouterr()
    place = f"{folder}/x.jsonl:2: a document of 21 tokens, the format holds 20"
    assert err == f"mcore-data: skipped {place}\n"
    assert "2 documents, 18 tokens" in out
    assert main([*command, "--strict"]) == 2
    assert capsys.readouterr().err == f"mcore-data: {place}\n"


def test_a_pair_of_image_and_text_is_read_or_named(folder, capsys):
    image = pytest.importorskip("PIL.Image")
    raw = io.BytesIO()
    image.new("RGB", (3, 3)).save(raw, "png")
    tar(folder / "x.tar", ("a.png", raw.getvalue()), ("a.txt", b"x"), ("b.png", b""))
    assert main(["verify", f"{folder}/x.tar"]) == 0
    assert capsys.readouterr().out == f"{folder}/x.tar: 1 pairs of image and text, 1 left out, ok\n"
    tar(folder / "x.tar", ("a.png", raw.getvalue()[:40]), ("a.txt", b"x"))
    assert main(["verify", f"{folder}/x.tar"]) == 2
    assert f"{folder}/x.tar: 'a': no image that can be read (" in capsys.readouterr().err


def test_as_a_process(folder):
    os.truncate(folder / "c.idx", 50)
    run = [sys.executable, "-m", "mcore_data.cli", "verify", str(folder / "c")]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"mcore-data: {folder}/c.idx: truncated, 50 bytes")
    assert result.stderr.count("\n") == 1
