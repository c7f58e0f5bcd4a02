import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data import IndexedReader, IndexedWriter, build_index
from mcore_data.indexed import reader as reader_module


def write(prefix, documents, dtype="uint16"):
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)


DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 255), max_size=9), max_size=4), max_size=9)


@given(
    documents=DOCUMENTS,
    dtype=st.sampled_from(["uint8", "int8", "int16", "int32", "int64", "uint16", "f4", "f8"]),
    access=st.sampled_from(["mmap", "pread"]),
)
@settings(max_examples=60, deadline=None)
def test_round_trip(tmp_path_factory, documents, dtype, access):
    prefix = tmp_path_factory.mktemp("d") / "corpus"
    values = [[token % 120 for token in s] for d in documents for s in d]
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            flat = [token % 120 for s in document for token in s]
            writer.add_document(np.array(flat, np.int64), [len(s) for s in document])
    ends = np.cumsum([0] + [len(d) for d in documents])
    lengths = np.array([len(v) for v in values], np.int64)
    index = Path(f"{prefix}.idx").read_bytes()
    assert index == build_index(lengths, ends, dtype)
    with IndexedReader(prefix, access=access) as reader:
        reader.verify(vocab_size=120)
        assert reader.dtype == np.dtype(dtype)
        assert [s.tolist() for s in reader] == values
        assert reader.lengths.tolist() == lengths.tolist()
        assert reader.document_indices.tolist() == ends.tolist()
        assert (len(reader), reader.num_documents) == (len(values), len(documents))
        assert reader.num_tokens == lengths.sum()
        for i, document in enumerate(documents):
            assert reader.document(i).tolist() == [t % 120 for s in document for t in s]


def test_slices_of_a_sequence(tmp_path):
    write(tmp_path / "c", [[1, 2, 3, 4, 5], [6, 7]])
    reader = IndexedReader(tmp_path / "c")
    assert reader.get(0, 1, 3).tolist() == [2, 3, 4]
    assert reader.get(1, 1).tolist() == [7]
    assert reader.get(0, 5).tolist() == []
    assert not reader[0].flags.writeable
    for index, offset, length in ((0, 4, 2), (0, 6, None), (1, -1, 1), (1, 0, -1)):
        with pytest.raises(ValueError, match=f"of sequence {index}, which has"):
            reader.get(index, offset, length)
    for index in (2, -1):
        with pytest.raises(IndexError, match=f"sequence {index} of 2"):
            reader.get(index)


def test_readers_travel_between_processes(tmp_path):
    write(tmp_path / "c", [[1, 2], [3]])
    for access in ("mmap", "pread"):
        copy = pickle.loads(pickle.dumps(IndexedReader(tmp_path / "c", access=access)))
        assert (copy[0].tolist(), copy.access) == ([1, 2], access)
    with pytest.raises(ValueError, match="access is 'map', it can be 'mmap', 'pread' or 'object'"):
        IndexedReader(tmp_path / "c", access="map")


def test_positioned_reads_hold_no_file_open_and_notice_a_shortened_one(tmp_path):
    write(tmp_path / "c", [[1, 2], [3]])
    opened = len(os.listdir("/proc/self/fd"))
    with IndexedReader(tmp_path / "c", access="pread") as reader:
        assert len(os.listdir("/proc/self/fd")) == opened + 1
        os.truncate(tmp_path / "c.bin", 2)
        with pytest.raises(OSError, match=r"c.bin: it ends 2 bytes too early"):
            reader.get(0)
    del reader
    assert len(os.listdir("/proc/self/fd")) == opened


def test_modes(tmp_path):
    with IndexedWriter(tmp_path / "m", np.int32, multimodal=True) as writer:
        writer.add_document([1, 2, 3], [2, 1], modes=[0, 1])
        with pytest.raises(ValueError, match="document 1: modes are required"):
            writer.add_document([1])
        with pytest.raises(ValueError, match="document 1: 2 modes for 1 sequences"):
            writer.add_document([1], modes=[0, 1])
    modes = IndexedReader(tmp_path / "m").modes
    assert modes is not None
    assert modes.tolist() == [0, 1]
    assert IndexedReader(tmp_path / "m")[1].tolist() == [3]


def test_many_documents_at_once(tmp_path):
    write(tmp_path / "one", [[1, 2], [3], [4, 5, 6]])
    with IndexedWriter(tmp_path / "many", "uint16") as writer:
        writer.add_documents([1, 2, 3], [2, 1])
        writer.add_documents([4, 5, 6], [3])
        assert (writer.num_documents, writer.num_tokens) == (3, 6)
    for suffix in (".bin", ".idx"):
        one = (tmp_path / f"one{suffix}").read_bytes()
        assert (tmp_path / f"many{suffix}").read_bytes() == one


def test_writer_refuses_what_does_not_fit(tmp_path):
    writer = IndexedWriter(tmp_path / "c", "uint16")
    writer.add_document([1])
    for tokens, lengths, message in (
        ([65_536], None, r"document 1: int64 values 65536 to 65536 do not fit uint16"),
        ([-1], None, r"document 1: .* -1 to -1 do not fit uint16 \(0 to 65535\)"),
        ([0.5], None, r"float64 values .* do not fit uint16"),
        ([1, 2], [1], r"document 1: sequence lengths sum to 1, there are 2 tokens"),
        ([1, 2], [3, -1], r"lengths -1 to 3, the format holds 0 to 2147483647"),
        ([[1]], None, r"shape \(1, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            writer.add_document(tokens, lengths)
    # A document of 2^31 tokens, without its 4 GB.
    huge = np.broadcast_to(np.zeros(1, "<u2"), (2**31,))
    with pytest.raises(ValueError, match="2147483648, the format holds 0 to 2147483647"):
        writer.add_document(huge)
    writer.finalize()
    with pytest.raises(ValueError, match="already finalised"):
        writer.add_document([1])
    with pytest.raises(ValueError, match="already finalised"):
        writer.finalize()
    assert IndexedReader(tmp_path / "c")[0].tolist() == [1]


def damage(path, position, value):
    raw = bytearray(path.read_bytes())
    raw[position : position + len(value)] = value
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda b, i: damage(i, 0, b"X"), r"c.idx: starts with b'XMIDIDX.*index starts with"),
        (lambda b, i: damage(i, 9, b"\2"), "c.idx: version 2, this reader knows version 1"),
        (lambda b, i: damage(i, 17, b"\11"), "c.idx: dtype code 9, known codes are 1 to 8"),
        (lambda b, i: damage(i, 26, bytes(8)), "c.idx: document array of length 0"),
        (lambda b, i: i.write_bytes(b""), "c.idx: starts with b''"),
        (lambda b, i: i.write_bytes(i.read_bytes()[:20]), "c.idx: truncated, 20 bytes"),
        (
            lambda b, i: i.write_bytes(i.read_bytes()[:-3]),
            "c.idx: truncated, 79 bytes where 2 sequences and 2 documents take 82",
        ),
        (
            lambda b, i: i.write_bytes(i.read_bytes() + b"1"),
            "c.idx: too long, 83 bytes where 2 sequences",
        ),
        (
            lambda b, i: b.write_bytes(b.read_bytes()[:-1]),
            "c.bin: truncated, 9 bytes where the last of 2 sequences ends at byte 10",
        ),
        (lambda b, i: b.unlink(), "c.bin: no such file"),
        (lambda b, i: i.unlink(), "c.idx: no such file"),
        (lambda b, i: damage(i, 74, b"\1"), "document array runs from 0 to 1, .* the 2 sequences"),
    ],
)
def test_damaged_files_are_named(tmp_path, fault, message):
    write(tmp_path / "c", [[1, 2, 3], [4, 5]])
    fault(tmp_path / "c.bin", tmp_path / "c.idx")
    with pytest.raises(ValueError, match=message) as caught:
        IndexedReader(tmp_path / "c")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (34, b"\xff\xff\xff\xff", "sequence 0 has a negative length"),
        (34, b"\x09", "sequence 0 ends after the 10 bytes"),
        (42, b"\xfe" + b"\xff" * 7, r"sequence 0 starts before byte 0 \(offset -2, length 3\)"),
        (34, b"\x02", r"sequence 1 does not start where the one before ends \(offset 6, length 2"),
        (66, b"\x03", r"document 1 ends before it starts \(2 after 3\)"),
    ],
)
@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_verify_finds_inner_damage(tmp_path, position, value, message, access):
    write(tmp_path / "c", [[1, 2, 3], [4, 5]])
    IndexedReader(tmp_path / "c", access=access).verify()
    damage(tmp_path / "c.idx", position, value)
    reader = IndexedReader(tmp_path / "c", access=access)
    with pytest.raises(ValueError, match=message):
        reader.verify()
    if position == 42:
        with pytest.raises(ValueError, match="sequence 0 is said to lie at bytes -2 to 4"):
            reader.get(0)


def test_files_that_are_no_pair_do_not_open(tmp_path):
    """The index of another corpus, or of the same in another dtype, fits only by chance."""
    write(tmp_path / "c", [[1, 2, 3], [4, 5]])
    write(tmp_path / "wide", [[1, 2, 3], [4, 5]], "int32")
    (tmp_path / "c.bin").write_bytes((tmp_path / "wide.bin").read_bytes())
    with pytest.raises(
        ValueError, match=r"c.bin: 20 bytes where the 2 .* take 0 to 10: .* no pair"
    ):
        IndexedReader(tmp_path / "c")


def test_verify_reads_the_tokens(tmp_path, monkeypatch):
    write(tmp_path / "c", [[1, 2], [], [3, 9, 4]])
    monkeypatch.setattr(reader_module, "_TOKENS", 2)
    reader = IndexedReader(tmp_path / "c")
    reader.verify(vocab_size=10)
    message = (
        r"c.bin: token 9 at position 1 of sequence 2 \(byte 6\) is outside the vocabulary of 9"
    )
    with pytest.raises(ValueError, match=message):
        reader.verify(vocab_size=9)
    write(tmp_path / "n", [[1, -2]], "int16")
    with pytest.raises(ValueError, match="token -2 at position 1 of sequence 0"):
        IndexedReader(tmp_path / "n").verify(vocab_size=5)


def test_wrong_names_are_explained(tmp_path):
    write(tmp_path / "c", [[1]])
    with pytest.raises(ValueError, match=r"is a directory; .* for example .*/c$"):
        IndexedReader(tmp_path)
    with pytest.raises(ValueError, match=r"c.idx.idx: no such file; give the prefix .*/c$"):
        IndexedReader(tmp_path / "c.idx")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no .idx"):
        IndexedReader(tmp_path / "empty")


def test_a_folder_beside_the_files_may_have_their_name(tmp_path):
    """Megatron-LM keeps its index caches in such a folder."""
    write(tmp_path / "c", [[1]])
    (tmp_path / "c" / "cache").mkdir(parents=True)
    assert IndexedReader(tmp_path / "c")[0].tolist() == [1]


def test_nothing_appears_before_the_end_or_after_a_fault(tmp_path):
    write(tmp_path / "c", [[1]])

    def fail():
        with IndexedWriter(tmp_path / "c", "uint16") as writer:
            writer.add_document([2])
            assert IndexedReader(tmp_path / "c")[0].tolist() == [1]
            raise KeyError("stop")

    with pytest.raises(KeyError):
        fail()
    assert IndexedReader(tmp_path / "c")[0].tolist() == [1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.bin", "c.idx"]


@pytest.mark.parametrize("renames", [0, 1])
def test_a_crash_between_the_two_files_leaves_no_wrong_pair(tmp_path, monkeypatch, renames):
    write(tmp_path / "c", [[1]])
    writer = IndexedWriter(tmp_path / "c", "uint16")
    writer.add_document([2, 3])
    real, done = Path.replace, []

    def replace(self, target):
        if len(done) == renames:
            raise OSError("disk is gone")
        done.append(target)
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with pytest.raises(OSError, match="disk is gone"):
            writer.finalize()
    with pytest.raises(ValueError, match=r"c.idx: no such file"):
        IndexedReader(tmp_path / "c")
    assert not list(tmp_path.glob(".*"))


def test_a_killed_writer_leaves_nothing_that_stays(tmp_path):
    code = (
        "import os, signal, sys; from mcore_data.indexed import IndexedWriter;"
        "w = IndexedWriter(sys.argv[1], 'uint16'); w.add_document(range(9999));"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, tmp_path / "c"], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".c.bin.")
    with IndexedWriter(tmp_path / "c", "uint16") as first:
        first.add_document([1])
        assert left not in os.listdir(tmp_path)
        # One that is at work is left alone.
        with IndexedWriter(tmp_path / "c", "uint16") as second:
            second.add_document([2])
    assert IndexedReader(tmp_path / "c")[0].tolist() == [1]
    assert sorted(os.listdir(tmp_path)) == ["c.bin", "c.idx"]


_WRITERS = """
import os, sys
from mcore_data import IndexedWriter

for prefix in sys.argv[1:]:
    gate, opener = os.pipe()
    children = []
    for i in range(8):
        child = os.fork()
        if child == 0:
            os.read(gate, 1)
            with IndexedWriter(prefix, "uint16") as writer:
                writer.add_document([i] * (i + 1))
            os._exit(0)
        children.append(child)
    os.write(opener, b"." * 8)
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


def test_writers_of_one_prefix_do_not_mix_their_files(tmp_path):
    rounds = [tmp_path / str(i) / "c" for i in range(3)]
    run = [sys.executable, "-c", _WRITERS, *rounds]
    output = subprocess.run(run, stdout=subprocess.PIPE, check=True).stdout
    assert output.decode() == f"{[0] * 8}\n" * 3
    for prefix in rounds:
        (tokens,) = list(IndexedReader(prefix))
        assert tokens.tolist() == [tokens[0]] * (tokens[0] + 1)
        assert prefix.with_suffix(".bin").stat().st_size == tokens.nbytes
        assert sorted(os.listdir(prefix.parent)) == ["c.bin", "c.idx"]
