import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data import IndexedReader, IndexedWriter
from mcore_data.indexed import build_index, merge, split, writer

DOCUMENTS = st.lists(
    st.lists(st.lists(st.integers(0, 100), max_size=6), max_size=3), min_size=1, max_size=7
)


def write(prefix, documents, dtype="uint16", *, modes=False):
    with IndexedWriter(prefix, dtype, multimodal=modes) as out:
        for number, document in enumerate(documents):
            flat = np.array([token for part in document for token in part], np.int64)
            lengths = [len(part) for part in document]
            out.add_document(flat, lengths, [number % 2] * len(lengths) if modes else None)


def content(prefix):
    with IndexedReader(prefix) as reader:
        reader.verify()
        return [reader.document(i).tolist() for i in range(reader.num_documents)]


@given(
    files=st.lists(DOCUMENTS, min_size=1, max_size=4),
    modes=st.booleans(),
    dtype=st.sampled_from(["uint8", "int8", "int16", "uint16", "int32", "int64", "f4", "f8"]),
    step=st.integers(1, 9),
)
@settings(max_examples=15, deadline=None)
def test_merged_then_cut_again(tmp_path_factory, files, modes, dtype, step):
    """Any dtype, with modes or without, in steps of any size: the bytes of one writer."""
    folder = tmp_path_factory.mktemp("m")
    prefixes = [folder / f"f{k}" for k in range(len(files))]
    for prefix, documents in zip(prefixes, files, strict=True):
        write(prefix, documents, dtype, modes=modes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_COPIED", step)
        merge(prefixes, folder / "all")
        cuts = np.cumsum([0] + [len(documents) for documents in files]).tolist()
        ranges = [range(a, b) for a, b in itertools.pairwise(cuts)]
        split(folder / "all", {folder / f"g{k}": r for k, r in enumerate(ranges)})
    flat = [[token for part in doc for token in part] for documents in files for doc in documents]
    assert content(folder / "all") == flat
    for k in range(len(files)):
        for suffix in (".bin", ".idx"):
            again = (folder / f"g{k}{suffix}").read_bytes()
            assert again == (folder / f"f{k}{suffix}").read_bytes()


def test_files_whose_sequences_lie_elsewhere_can_be_copied(tmp_path):
    """The format allows any offsets; a copy lies back to back."""
    write(tmp_path / "c", [[[1, 2, 3]], [[4, 5]], [[6]]])
    raw = bytearray((tmp_path / "c.idx").read_bytes())
    raw[34 + 12 : 34 + 36] = np.array([6, 0, 2], "<i8").tobytes()
    (tmp_path / "c.idx").write_bytes(raw)
    reader = IndexedReader(tmp_path / "c")
    assert reader.get_run(0, 3) is None
    assert reader.get_run(0, 1).tolist() == [4, 5, 6]
    with IndexedWriter(tmp_path / "d", "uint16") as out:
        out.append(reader)
    assert content(tmp_path / "d") == [[4, 5, 6], [1, 2], [2]]


def test_what_cannot_be_merged(tmp_path):
    write(tmp_path / "a", [[[1]], [[2]]])
    write(tmp_path / "b", [[[1]]], "int32")
    write(tmp_path / "m", [[[1]]], modes=True)
    write(tmp_path / "broken", [[[1]], [[2]]])
    (tmp_path / "broken.bin").write_bytes(b"123456")
    for prefixes, output, message in (
        ([], "x", "nothing to merge"),
        (["a", "b"], "x", "b holds int32, .*/a holds uint16: files of one kind"),
        (["m", "a"], "x", "a holds uint16, .*/m holds uint16 with modes"),
        (["a", "absent"], "x", "absent.idx: no such file"),
        (["a", "broken"], "x", "broken.bin: 6 bytes where the 2 sequences .* take 0 to 4"),
        (["a", "m"], "a", "/a: it is one of the files to merge"),
    ):
        before = sorted(p.name for p in tmp_path.iterdir())
        with pytest.raises(ValueError, match=message) as caught:
            merge([tmp_path / p for p in prefixes], tmp_path / output)
        assert "\n" not in str(caught.value)
        assert sorted(p.name for p in tmp_path.iterdir()) == before
    for documents, output, message in (
        (range(3), "x", "/a: documents 0 to 3 asked for, it has 2"),
        (range(0, 2, 2), "x", "no range of step 1"),
        (range(-1, 1), "x", "no range of step 1"),
        (range(1), "a", "/a: it is the file to split"),
    ):
        with pytest.raises(ValueError, match=message):
            split(tmp_path / "a", {tmp_path / output: documents})
    with IndexedWriter(tmp_path / "x", "int32") as out:
        with pytest.raises(ValueError, match=r"/a holds uint16, .*/x is written as int32"):
            out.append(IndexedReader(tmp_path / "a"))
        out.add_document([1])
    with IndexedWriter(tmp_path / "x", "uint16", multimodal=True) as out:
        with pytest.raises(ValueError, match=r"/a has no modes, .*/x is written the other way"):
            out.append(IndexedReader(tmp_path / "a"))
        out.add_document([1], modes=[0])


def test_offsets_beyond_32_bits_are_copied(tmp_path):
    """U09: a file of 5 GB (a hole on the disk): its last document is copied from where it lies."""
    lengths = np.array([2**31 - 1, 2**29, 3], np.int32)
    (tmp_path / "big.idx").write_bytes(build_index(lengths, np.arange(4), "uint16"))
    size = 2 * int(lengths.sum(dtype=np.int64))
    with open(tmp_path / "big.bin", "wb") as file:
        file.seek(size - 6)
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    split(tmp_path / "big", {tmp_path / "last": range(2, 3)})
    assert content(tmp_path / "last") == [[7, 8, 9]]
    for access in ("mmap", "pread"):
        with IndexedReader(tmp_path / "big", access=access) as reader:
            assert reader[2].tolist() == [7, 8, 9]
            assert reader.get(0, 2**31 - 3, 2).tolist() == [0, 0]
