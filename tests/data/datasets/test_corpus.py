import json
import os

import numpy as np
import pytest

from mcore_data import (
    Blend,
    BlendedDataset,
    Corpus,
    GPTDataset,
    IndexedReader,
    IndexedWriter,
    blend_index,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Three prefixes; every token of file k has the hundreds k + 1, document d the rest."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    prefixes = []
    for k, count in enumerate((40, 60, 20)):
        prefix = str(folder / "abc"[k])
        with IndexedWriter(prefix, "uint16") as writer:
            for document in range(count):
                writer.add_document([100 * (k + 1) + document] * int(rng.integers(5, 15)))
        prefixes.append(prefix)
    return prefixes


def tokens_of(dataset):
    return {int(token) for i in range(len(dataset)) for token in dataset[i].tokens}


def test_lists_of_files_and_weights():
    assert Blend.parse("a b") == Blend(prefixes=("a", "b"))
    assert Blend.parse(["0.3", "a", "7", "./7"]) == Blend(prefixes=("a", "./7"), weights=(0.3, 7.0))
    for text, message in (
        ("0.3 a b", "entry 2 is 'b' where a weight should be"),
        ("a 0.3", "entry 0 is 'a' where a weight should be"),
        ("0.3 0.7", "entry 1 is '0.7' where a file should be"),
        ("0.3 a 0.7", "the last weight of the blend, 0.7, has no file"),
        ("", "at least one file"),
        ("-1 a", "weight 0 of the blend is -1.0"),
        ("nan a", "weight 0 of the blend is nan"),
        ("0 a 0 b", "the 2 weights of the blend sum to 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            Blend.parse(text)
    for options, message in (
        ({"weights": (1.0,)}, "1 weights for 2 files"),
        ({"counts": (1, -1)}, r"counts \[1, -1\] must be >= 0"),
        ({"counts": (1, 2), "weights": (1.0, 1.0)}, "weights or counts, not both"),
    ):
        with pytest.raises(ValueError, match=message):
            Blend(prefixes=("a", "b"), **options)
    assert Blend.parse("x/a y/a x/b").names() == ["x/a", "y/a", "x/b"]


def test_blend_by_weights_cut_by_a_split(files):
    """U10: every source gives its share of every part, from its own documents."""
    corpus = Corpus(train=Blend.parse(f"3 {files[0]} 7 {files[1]}"), split="8,2")
    parts = corpus.build(train=100, validation=10, test=0, seq_length=8, seed=1)
    assert isinstance(parts.train, BlendedDataset)
    assert parts.train.count(range(100)).tolist() == [30, 70]
    assert parts.train.index.sources[:10].tolist() == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    for source, sample in ((0, 0), (1, 1)):
        place = [parts.train.locate(i) for i in range(100)].index((source, sample))
        expected = parts.train.datasets[source][sample]
        assert parts.train[place].tokens.tolist() == expected.tokens.tolist()
    cuts = [(100, 132, 140), (200, 248, 260)]
    assert tokens_of(parts.train) <= {t for a, b, _ in cuts for t in range(a, b)}
    assert tokens_of(parts.validation["validation"]) <= {t for _, b, c in cuts for t in range(b, c)}
    assert parts.test is None
    for index in (-1, 100):
        with pytest.raises(IndexError, match=f"sample {index} of 100"):
            parts.train[index]


def test_every_sample_once(files):
    """Without weights each source is read for one epoch, and none of its samples is repeated."""
    parts = Corpus(train=Blend(prefixes=tuple(files))).build(seq_length=8)
    sources = [GPTDataset(IndexedReader(prefix), seq_length=8) for prefix in files]
    assert len(parts.train) == sum(map(len, sources))
    assert parts.train.count(range(len(parts.train))).tolist() == [len(s) for s in sources]
    ours = sorted(parts.train[i].tokens.tolist() for i in range(len(parts.train)))
    assert ours == sorted(s[i].tokens.tolist() for s in sources for i in range(len(s)))
    fewer = Corpus(train=Blend(prefixes=tuple(files))).build(train=25, seq_length=8)
    assert len(fewer.train) == 25


def test_counts_for_every_file(files):
    corpus = Corpus(train=Blend(prefixes=tuple(files), counts=(12, 0, 60)))
    train = corpus.build(seq_length=8).train
    assert train.count(range(72)).tolist() == [12, 0, 60]
    assert train.datasets[1] is None
    assert len(train.datasets[2]) >= 60  # several epochs of a short file
    with pytest.raises(ValueError, match=r"train: 73 samples asked for, the counts .* sum to 72"):
        corpus.build(train=73, seq_length=8)


def test_a_source_that_is_too_short_begins_again(files):
    """U10: a local index never leaves its source, it wraps by whole epochs."""
    short = GPTDataset(IndexedReader(files[2]), seq_length=30)
    blended = BlendedDataset([short], blend_index([1], 2 * len(short) + 1))
    for i in range(len(blended)):
        assert blended[i].tokens.tolist() == short[i % len(short)].tokens.tolist()
    with pytest.raises(ValueError, match="source 1 of the blend has no samples, 2 are drawn"):
        BlendedDataset([short, None], blend_index([1, 1], 4))
    with pytest.raises(ValueError, match="the index names 2 sources of 1"):
        BlendedDataset([short], blend_index([1, 1], 4))


def test_one_file_is_no_blend(files):
    corpus = Corpus(train=Blend.parse(files[0]), split="9,1")
    parts = corpus.build(train=50, validation=None, test=0, seq_length=8, seed=5)
    assert isinstance(parts.train, GPTDataset)
    assert len(parts.train) >= 50


def test_a_file_of_blends(files, tmp_path):
    a, b, c = files
    path = tmp_path / "data.json"
    path.write_text(
        json.dumps(
            {
                "train": ["1", a, "1", b],
                "valid": {"code": [c], "web": f"{a} {b}"},
                "test": {"files": [a, b], "counts": [3, 4]},
            }
        )
    )
    corpus = Corpus.read(path)
    parts = corpus.build(train=20, seq_length=8)
    assert list(parts.validation) == ["code", "web"]
    assert tokens_of(parts.validation["code"]) <= set(range(300, 320))
    assert parts.test is not None
    assert parts.test.count(range(7)).tolist() == [3, 4]
    names = [row.part for row in corpus.plan(train=20, seq_length=8)]
    assert names == ["train"] * 2 + ["validation/code"] + ["validation/web"] * 2 + ["test"] * 2

    path.write_text(json.dumps({"train": [a], "valid": [a, b], "test": None}))
    each = Corpus.read(path, each_validation=True).build(validation=3, seq_length=8)
    assert list(each.validation) == ["a", "b"]
    for content, message in (
        ("{", "data.json: no JSON"),
        ("[]", "it holds no JSON object"),
        ('{"trian": ["a"]}', "key 'trian'; there are train, validation and test"),
        ('{"valid": ["a"], "validation": ["a"]}', "key 'validation'"),
        ('{"train": 3}', "data.json: train: a blend is a list, a text or an object, not int"),
        ('{"train": ["1", "a", "b"]}', "data.json: train: blend entry 2"),
        ('{"valid": {"web": {"files": ["a"], "weihgts": [1]}}}', "valid.web: keys are"),
        ('{"train": {"files": "ab"}}', "train: files is 'ab', it must be a list of texts"),
        ('{"train": {"files": ["a"], "counts": [1.5]}}', "must be a list of whole numbers"),
        ('{"train": {"files": ["a"], "weights": ["1"]}}', "must be a list of numbers"),
        ("{}", "data.json: a corpus needs files for one of its parts"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message) as caught:
            Corpus.read(path)
        assert "\n" not in str(caught.value)


def test_what_a_corpus_refuses(files):
    blend = Blend.parse(f"1 {files[0]} 1 {files[2]}")
    for options, message in (
        ({}, "needs files for one of its parts"),
        ({"split": "9,1"}, "split '9,1' cuts the files of train"),
        ({"split": "9,1", "train": blend, "test": blend}, "split '9,1' cuts the files of train"),
        ({"split": "9,x", "train": blend}, "validation weight 'x'"),
        (
            {"split": "9,1", "train": Blend(prefixes=("a",), counts=(1,))},
            "counts of a blend are samples of one part",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Corpus(**options)
    with pytest.raises(ValueError, match="train: a blend by weights needs a number of samples"):
        Corpus(train=blend).build(seq_length=8)
    few = Corpus(train=blend, split="98,2")
    with pytest.raises(ValueError, match=r"validation: .* samples of .*/c, which has no document"):
        few.build(train=10, validation=10, test=0, seq_length=8)
    with pytest.raises(ValueError, match=r"/absent.idx: no such file"):
        Corpus(train=Blend.parse("/absent")).build(seq_length=8)


def test_plan_says_what_build_does(files):
    corpus = Corpus(train=Blend.parse(f"3 {files[0]} 7 {files[1]}"), split="8,2")
    rows = corpus.plan(train=200, validation=7, test=0, seq_length=8)
    parts = corpus.build(train=200, validation=7, test=0, seq_length=8)
    for name, dataset in (("train", parts.train), ("validation", parts.validation["validation"])):
        mine = [row for row in rows if row.part == name]
        assert [row.samples for row in mine] == dataset.count(range(len(dataset))).tolist()
        for row, source in zip(mine, dataset.datasets, strict=True):
            documents = np.unique(source.index.documents)
            assert row.documents == len(documents)
            assert row.tokens == source.reader.lengths[documents].sum()
            assert row.epochs == pytest.approx(row.samples * 8 / row.tokens)
    assert sum(row.samples for row in rows if row.part == "train") == 200
    short = Corpus(train=Blend.parse(files[2]))
    message = r"/c: 20 documents .*with \d+ tokens hold no sample of seq_length 4000, .* 4001"
    for call in (short.plan, short.build):
        with pytest.raises(ValueError, match=message):
            call(seq_length=4000)
    assert short.plan(train=2, seq_length=4000)[0].epochs > 1
    once = Corpus(train=Blend(prefixes=tuple(files))).plan(seq_length=8)
    assert [row.samples for row in once] == [
        len(GPTDataset(IndexedReader(prefix), seq_length=8)) for prefix in files
    ]


def test_cache(files, tmp_path):
    corpus = Corpus(train=Blend.parse(f"3 {files[0]} 7 {files[1]}"))
    first, second = (
        corpus.build(train=50, seq_length=8, cache_dir=tmp_path).train for _ in range(2)
    )
    assert len(os.listdir(tmp_path)) == 3
    assert isinstance(second.index.sources, np.memmap)
    assert first.index.sources.tolist() == second.index.sources.tolist()
    assert second[49].tokens.tolist() == first[49].tokens.tolist()
    corpus.build(train=51, seq_length=8, cache_dir=tmp_path)
    Corpus(train=Blend.parse(f"4 {files[0]} 7 {files[1]}")).build(
        train=50, seq_length=8, cache_dir=tmp_path
    )
    blends = [p for p in tmp_path.iterdir() if (p / "sources.npy").exists()]
    assert len(blends) == 3
