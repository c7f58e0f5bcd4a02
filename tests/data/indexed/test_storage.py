"""Files in object storage, read from a server on this machine that can be made to fail."""

import os
import pickle
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from mcore_data import GPTDataset, IndexedReader, IndexedWriter, Storage
from mcore_data.cli import main
from mcore_data.indexed import merge

from .object_server import ObjectServer

pytest.importorskip("obstore")
KEYS = {"access_key_id": "k", "secret_access_key": "s", "region": "us-east-1"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A file of 300 documents of one sequence or two, with modes."""
    prefix = tmp_path_factory.mktemp("c") / "corpus"
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, "uint16", multimodal=True) as writer:
        for i in range(300):
            size = int(rng.integers(1, 90))
            cut = [size] if i % 3 else [size // 2, size - size // 2]
            writer.add_document(rng.integers(0, 500, size), cut, [i % 2] * len(cut))
    return prefix


@pytest.fixture
def server(corpus):
    with ObjectServer() as server:
        for suffix in (".bin", ".idx"):
            raw = corpus.with_name(f"corpus{suffix}").read_bytes()
            server.objects[f"/bucket/deep/corpus{suffix}"] = raw
        yield server


@pytest.fixture
def storage(server):
    options = {**KEYS, "endpoint": server.endpoint}
    return Storage(
        options=options, block_bytes=2048, cached_blocks=4, backoff_s=0.001, timeout_s=20
    )


URL = "s3://bucket/deep/corpus"


def same(reader, corpus):
    with IndexedReader(corpus) as local:
        assert [s.tolist() for s in reader] == [s.tolist() for s in local]
        for name in ("lengths", "offsets", "document_indices", "modes"):
            assert np.array_equal(getattr(reader, name), getattr(local, name))
        assert reader.document(6).tolist() == local.document(6).tolist()
        assert (reader.dtype, reader.num_bytes) == (local.dtype, local.num_bytes)


def test_s3(server, storage, corpus):
    """Over signed requests: what a local reader gives, in any order, from many threads, pickled."""
    with IndexedReader(URL, storage=storage) as reader:
        assert reader.access == "object"
        same(reader, corpus)
        reader.verify(vocab_size=500)
        order = np.random.default_rng(1).permutation(len(reader))[:120].tolist()
        local = IndexedReader(corpus)
        with ThreadPoolExecutor(4) as pool:
            for i, got in zip(order, pool.map(reader.get, order), strict=True):
                assert got.tolist() == local[i].tolist()
        copy = pickle.loads(pickle.dumps(reader))
        assert copy[17].tolist() == local[17].tolist()
        copy.close()
    assert server.signed == len(server.requests)
    assert not reader.num_bytes


@pytest.mark.parametrize("kind", ["http", "file", "memory"])
def test_other_schemes(server, corpus, kind):
    fsspec = pytest.importorskip("fsspec")
    prefix = f"{server.endpoint}/bucket/deep/corpus"
    if kind == "file":
        prefix = f"file://{corpus}"
    elif kind == "memory":
        prefix = "memory://somewhere/corpus"
        for suffix in (".bin", ".idx"):
            raw = corpus.with_name(f"corpus{suffix}").read_bytes()
            fsspec.filesystem("memory").pipe(f"/somewhere/corpus{suffix}", raw)
    with IndexedReader(prefix, storage=Storage(block_bytes=1000)) as reader:
        same(reader, corpus)
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(prefix)}x.idx: no such file$"):
        IndexedReader(f"{prefix}x")


def test_an_object_that_changes_is_not_read_on(server, storage):
    """The bytes of one version beside the index of another would be other documents."""
    with IndexedReader(URL, storage=storage) as reader:
        first = reader[0].tolist()
        raw = server.objects["/bucket/deep/corpus.bin"]
        server.objects["/bucket/deep/corpus.bin"] = bytes(len(raw))
        server.requests.clear()
        what = r"corpus.bin: bytes \d+ to \d+: the object has changed since it was opened$"
        with pytest.raises(OSError, match=what):
            reader[len(reader) - 1]
        assert len(server.requests) == 1  # it does not come back by trying
    server.objects["/bucket/deep/corpus.bin"] = raw
    server.weak = "W/"
    with IndexedReader(URL, storage=storage) as reader:
        assert reader[0].tolist() == first


def test_a_timeout_is_not_silently_left_out():
    pytest.importorskip("fsspec")
    with pytest.raises(ValueError, match=r"^memory://a/b.idx: timeout_s=3 is for obstore: give"):
        IndexedReader("memory://a/b", storage=Storage(timeout_s=3))


def test_reads_in_a_row_are_few_requests(server, storage):
    """Blocks, not sequences, are asked for, each once, and the next ones before they are needed."""
    with IndexedReader(URL, storage=storage) as reader:
        server.requests.clear()
        for sequence in reader:
            assert sequence.dtype == np.uint16
    blocks = [span for method, _, span in server.requests if method == "GET"]
    assert len(blocks) == len(set(blocks)) == -(-len(server.objects[f"/{URL[5:]}.bin"]) // 2048)
    with IndexedReader(URL, storage=replace(storage, read_ahead=2)) as reader:
        server.requests.clear()
        reader.get(0)
        reader.get(1)
        reader._bin._pool.shutdown()
    assert len(server.requests) == 3


def test_the_index_is_fetched_once(server, storage, corpus, tmp_path):
    """Many at once share one local copy; another content is another copy, a cut one is none."""
    storage = replace(storage, cache_dir=tmp_path / "cache", retries=0)
    server.faults += [None, "cut"]
    with pytest.raises(OSError, match=r"corpus.idx: bytes \d+ to \d+: tried once"):
        IndexedReader(URL, storage=storage)
    assert list((tmp_path / "cache").iterdir()) == []

    def read(_):
        with IndexedReader(URL, storage=storage) as reader:
            same(reader, corpus)

    server.requests.clear()
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(read, range(6)))
    blocks = -(-len(server.objects["/bucket/deep/corpus.idx"]) // 2048)
    gets = [path for method, path, _ in server.requests if method == "GET"]
    # A few that the failed reader had under way may come on top.
    assert blocks <= gets.count("/bucket/deep/corpus.idx") < 2 * blocks
    assert len(list((tmp_path / "cache").iterdir())) == 1
    other = tmp_path / "other"
    with IndexedWriter(other, "uint16") as writer:
        writer.add_document([1, 2, 3])
    for suffix in (".bin", ".idx"):
        server.objects[f"/bucket/deep/corpus{suffix}"] = (tmp_path / f"other{suffix}").read_bytes()
    with IndexedReader(URL, storage=storage) as reader:
        assert reader[0].tolist() == [1, 2, 3]
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("name", ["blob_id", "modificationTime", "md5Hash"])
def test_an_index_of_the_same_size_is_not_taken_for_the_same(tmp_path, monkeypatch, name):
    """File systems call what changes with content by names of their own."""
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    known = type(files).info
    rounds, reads = iter(range(9)), iter(range(99))

    def info(self, path, **options):
        found = known(self, path, **options)
        found.pop("created", None)
        return {**found, name: f"v{version}", "atime": next(reads)}

    monkeypatch.setattr(type(files), "info", info)
    storage = Storage(cache_dir=tmp_path / "cache")
    for documents in ([[1, 2, 3], [4]], [[5], [6, 7, 8]]):
        version = next(rounds)
        with IndexedWriter(tmp_path / "c", "uint16") as writer:
            for tokens in documents:
                writer.add_document(tokens)
        for suffix in (".bin", ".idx"):
            files.pipe(f"/replaced/{name}{suffix}", (tmp_path / f"c{suffix}").read_bytes())
        for _ in range(2):
            with IndexedReader(f"memory://replaced/{name}", storage=storage) as reader:
                assert [sequence.tolist() for sequence in reader] == documents
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_errors_of_every_library_are_tried_again(corpus, monkeypatch):
    """Those below fsspec raise what they like."""
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    for suffix in (".bin", ".idx"):
        files.pipe(f"/odd/corpus{suffix}", corpus.with_name(f"corpus{suffix}").read_bytes())

    class HttpError(Exception):
        pass

    read, fails = type(files).cat_file, iter([True, True, False] * 2)

    def cat_file(self, path, **options):
        if next(fails):
            raise HttpError("503\nbusy")
        return read(self, path, **options)

    monkeypatch.setattr(type(files), "cat_file", cat_file)
    storage = Storage(retries=2, backoff_s=0)
    with (
        IndexedReader("memory://odd/corpus", storage=storage) as reader,
        IndexedReader(corpus) as r,
    ):
        assert reader[0].tolist() == r[0].tolist()
        fails = iter([True] * 3)
        with pytest.raises(OSError, match=r"corpus.idx: bytes .* 3 times, HttpError: 503 busy$"):
            IndexedReader("memory://odd/corpus", storage=storage)


FAULTS = {
    "drop": "tried 3 times, ",
    "cut": "tried 3 times, ",
    "short": "tried 3 times, 1024 of 2048 bytes came|tried 3 times, ",
    500: "tried 3 times, ",
    503: "tried 3 times, ",
    429: "tried 3 times, ",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failures_are_tried_again_and_then_named(server, storage, corpus, fault):
    storage = replace(storage, retries=2, read_ahead=0)
    with IndexedReader(URL, storage=storage) as reader:
        server.faults += [fault, fault, None]
        assert reader.get(0).tolist() == IndexedReader(corpus).get(0).tolist()
        assert not server.faults
        server.faults += [fault] * 3
        last = len(reader) - 1
        with pytest.raises(OSError, match=f"^{URL}.bin: bytes [0-9]+ to [0-9]+: ") as caught:
            reader.get(last)
        assert re.search(FAULTS[fault], str(caught.value))
        assert "\n" not in str(caught.value)
        assert reader.get(last).tolist() == IndexedReader(corpus).get(last).tolist()


@pytest.mark.parametrize("fault", [403, 401, 404])
def test_what_is_not_there_or_not_allowed_fails_at_once(server, storage, fault):
    with IndexedReader(URL, storage=replace(storage, read_ahead=0)) as reader:
        server.requests.clear()
        server.faults.append(fault)
        message = "no such file" if fault == 404 else "access denied"
        with pytest.raises(OSError, match=f"^{URL}.bin: {message}") as caught:
            reader.get(0)
        assert "\n" not in str(caught.value)
        assert len(server.requests) == 1


def test_a_fork_is_refused_where_it_would_hang(server, storage, corpus):
    reader = IndexedReader(URL, storage=storage)
    receive, send = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of Python warn of just this
        child = os.fork()
    if child == 0:
        try:
            for read in (lambda: reader[0], lambda: IndexedReader(URL, storage=storage)):
                try:
                    read()
                except OSError as error:
                    os.write(send, f"{error}\n".encode())
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        said = pipe.read().splitlines()
    os.waitpid(child, 0)
    assert said == [
        f"{URL}.bin: opened before a fork; start workers by spawn",
        f"{URL}.idx: obstore was in use before a fork; start workers by spawn",
    ]


def test_damaged_files_are_named(server, storage):
    server.objects["/bucket/deep/corpus.bin"] = server.objects["/bucket/deep/corpus.bin"][:-5]
    with pytest.raises(ValueError, match=f"^{URL}.bin: truncated, "):
        IndexedReader(URL, storage=storage)
    server.objects["/bucket/deep/corpus.idx"] = b"nonsense" * 9
    with pytest.raises(ValueError, match=f"^{URL}.idx: starts with b'nonsense"):
        IndexedReader(URL, storage=storage)


def test_everything_else_reads_them_too(server, storage, corpus, tmp_path, capsys):
    with IndexedReader(URL, storage=storage) as reader:
        far = GPTDataset(reader, seq_length=32, num_samples=40, seed=3)
        near = GPTDataset(IndexedReader(corpus), seq_length=32, num_samples=40, seed=3)
        assert all(np.array_equal(far[i].tokens, near[i].tokens) for i in range(40))
    web = f"{server.endpoint}/bucket/deep/corpus"
    assert main(["verify", web, "--vocab-size", "500"]) == 0
    assert "300 documents" in capsys.readouterr().out
    assert main(["inspect", web]) == 0
    assert f"bin_bytes  {len(server.objects['/bucket/deep/corpus.bin']):,}\n" in (
        capsys.readouterr().out
    )
    merge([web, corpus], tmp_path / "both")
    assert IndexedReader(tmp_path / "both").num_documents == 600
    assert main(["inspect", f"{server.endpoint}/bucket/none"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.endswith("/bucket/none.idx: no such file\n")


def test_faults_of_the_caller(corpus, monkeypatch):
    for options, message in (
        ({"block_bytes": 0}, "block_bytes is 0, the least is 1"),
        ({"retries": -1}, "retries is -1, the least is 0"),
        ({"timeout_s": 0}, "timeout_s is 0, it must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Storage(**options)
    for prefix, options, message in (
        ("s3://b/c", {"access": "mmap"}, "access is 'mmap', an address is read as 'object'"),
        (corpus, {"access": "object"}, "access is 'object', for a path"),
        (corpus, {"storage": Storage()}, "storage is given, for a path"),
        ("s3://b/c", {"storage": Storage(options={"no": "1"})}, "^s3://b/c.idx: .*no"),
        ("nonsense://b/c", {}, "^nonsense://b/c.idx: .*nonsense"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            IndexedReader(prefix, **options)
        assert "\n" not in str(caught.value)
    for library, prefix in (("obstore", "s3://b/c"), ("fsspec", "memory://c")):
        monkeypatch.delitem(sys.modules, f"mcore_data.indexed.{library}", raising=False)
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ValueError, match=re.escape("pip install 'mcore-data[storage]'")):
            IndexedReader(prefix)
