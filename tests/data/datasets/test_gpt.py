import itertools
import os

import numpy as np
import pytest

from mcore_data import GPTDataset, IndexedReader, IndexedWriter, gpt_splits

EOD = 0


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("gpt") / "c"
    rng = np.random.default_rng(5)
    with IndexedWriter(prefix, "uint16") as writer:
        for _ in range(60):
            writer.add_document(np.append(rng.integers(1, 500, rng.integers(0, 30)), EOD))
    return IndexedReader(prefix)


def one_document(tmp_path, tokens):
    with IndexedWriter(tmp_path / "one", "uint16") as writer:
        writer.add_document(tokens)
    return IndexedReader(tmp_path / "one")


@pytest.mark.parametrize("extra", [True, False])
def test_samples_are_the_stream_in_pieces(reader, extra):
    dataset = GPTDataset(
        reader, range(10, 50), seq_length=7, num_samples=200, seed=3, extra_token=extra
    )
    stream = np.concatenate([reader[i] for i in dataset.index.documents.tolist()])
    assert len(dataset) >= 200
    for i, row in enumerate(dataset.index.shuffle.tolist()):
        sample = dataset[i]
        np.testing.assert_array_equal(sample.tokens, stream[7 * row : 7 * row + 7])
        known = 7 if extra else 6
        np.testing.assert_array_equal(
            sample.labels[:known], stream[7 * row + 1 : 7 * row + 1 + known]
        )
        assert sample.loss_mask.tolist() == [1] * known + [0] * (7 - known)
        assert sample.positions.tolist() == list(range(7))
        assert sample.cu_seqlens.tolist() == [0, 7]
        dtypes = [a.dtype.name for a in (sample.tokens, sample.labels, sample.positions)]
        assert dtypes == ["int64"] * 3
        assert (sample.loss_mask.dtype, sample.cu_seqlens.dtype) == (np.float32, np.int32)
    for i in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"sample {i} of {len(dataset)}"):
            dataset[i]


@pytest.mark.parametrize(
    ("tokens", "positions", "bounds"),
    [
        ([1, 2, EOD, 3, 4, EOD], [0, 1, 2, 0, 1, 2], [0, 3, 6]),
        ([1, EOD, EOD, 2], [0, 1, 0, 0], [0, 2, 3, 4]),
    ],
)
def test_resets(tmp_path, tokens, positions, bounds):
    """U13: resets happen only if asked, each by its own option."""
    reader = one_document(tmp_path, [*tokens, 9])
    size = len(tokens)
    for position, attention in itertools.product([False, True], repeat=2):
        sample = GPTDataset(
            reader,
            seq_length=size,
            eod_id=EOD,
            reset_positions=position,
            reset_attention=attention,
        )[0]
        assert sample.tokens.tolist() == tokens
        assert sample.positions.tolist() == (positions if position else list(range(size)))
        assert sample.cu_seqlens.tolist() == (bounds if attention else [0, size])
        assert sample.loss_mask.tolist() == [1] * size


def test_loss_on_eod(tmp_path):
    """U13: EOD targets lose their loss only if asked; inputs are another option."""
    reader = one_document(tmp_path, [1, 2, EOD, 3, 4, EOD, 5])

    def mask(**options):
        return GPTDataset(reader, seq_length=6, eod_id=EOD, **options)[0].loss_mask.tolist()

    assert mask() == [1, 1, 1, 1, 1, 1]
    assert mask(mask_eod_loss=True) == [1, 0, 1, 1, 0, 1]
    assert mask(mask_after_eod=True) == [1, 1, 0, 1, 1, 0]
    assert mask(mask_eod_loss=True, mask_after_eod=True) == [1, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("pad", [2, 0, 7])
def test_padding_is_masked_by_count(tmp_path, pad):
    """U12: with padding id = EOS id a genuine EOS keeps its loss, and a warning says so."""
    reader = one_document(tmp_path, [11, 12, 2, 13])

    def build():
        return GPTDataset(
            reader,
            seq_length=5,
            eod_id=2,
            pad_id=pad,
            drop_last=False,
            reset_positions=True,
            reset_attention=True,
        )

    if pad == 2:
        with pytest.warns(UserWarning, match=r"pad_id and eod_id are both 2: .* keep their loss"):
            dataset = build()
    else:
        dataset = build()
    assert len(dataset) == 1
    sample = dataset[0]
    assert sample.tokens.tolist() == [11, 12, 2, 13, pad]
    assert sample.labels.tolist() == [12, 2, 13, pad, pad]
    assert sample.loss_mask.tolist() == [1, 1, 1, 0, 0]
    assert sample.positions.tolist() == [0, 1, 2, 0, 1]
    assert sample.cu_seqlens.tolist() == [0, 3, 5]


def test_options_need_an_eod(reader):
    for option in ("reset_positions", "reset_attention", "mask_eod_loss", "mask_after_eod"):
        with pytest.raises(ValueError, match=f"{option} needs eod_id"):
            GPTDataset(reader, seq_length=4, **{option: True})
    with pytest.raises(ValueError, match="documents 0 to 60 asked for, it has 60"):
        GPTDataset(reader, range(61), seq_length=4)
    with pytest.raises(ValueError, match=r"/c: 1 documents .* seq_length 4000"):
        GPTDataset(reader, [3], seq_length=4000)


def test_cache(reader, tmp_path):
    options = {"seq_length": 7, "num_samples": 200, "seed": 3}
    plain = GPTDataset(reader, range(50), **options)
    for _ in range(2):  # built, then read back
        cached = GPTDataset(reader, range(50), cache_dir=tmp_path, **options)
        for name in ("documents", "samples", "shuffle"):
            a, b = getattr(plain.index, name), getattr(cached.index, name)
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    assert len(os.listdir(tmp_path)) == 1
    others = [
        {**options, "seq_length": 8},
        {**options, "num_samples": 201},
        {**options, "num_samples": None},
        {**options, "seed": 4},
        {**options, "extra_token": False},
        {**options, "drop_last": False},
    ]
    for other in others:
        GPTDataset(reader, range(50), cache_dir=tmp_path, **other)
    GPTDataset(reader, range(49), cache_dir=tmp_path, **options)
    assert len(os.listdir(tmp_path)) == 2 + len(others)
    # What does not change the index does not build another one.
    GPTDataset(reader, range(50), cache_dir=tmp_path, eod_id=EOD, reset_positions=True, **options)
    assert len(os.listdir(tmp_path)) == 2 + len(others)


def test_nodes_with_folders_of_their_own_agree(reader, tmp_path):
    """U14: every node builds in its own folder, and both have the same samples."""
    options = {"seq_length": 7, "num_samples": 200, "seed": 3}
    nodes = [GPTDataset(reader, cache_dir=tmp_path / node, **options) for node in ("a", "b")]
    names = [os.listdir(tmp_path / node) for node in ("a", "b")]
    assert names[0] == names[1]
    for i in range(10):
        assert nodes[0][i].tokens.tolist() == nodes[1][i].tokens.tolist()


def test_splits_of_a_file(reader):
    training, validation, test = gpt_splits(reader, "80,20", (100, None, 10), seq_length=5, seed=1)
    assert training is not None
    assert validation is not None
    assert test is None
    assert len(training) >= 100
    assert set(training.index.documents.tolist()) == set(range(48))
    assert set(validation.index.documents.tolist()) == set(range(48, 60))
    assert gpt_splits(reader, "1,1,1", (0, 0, 5), seq_length=5)[:2] == (None, None)
    with pytest.raises(ValueError, match="num_samples has 2 entries"):
        gpt_splits(reader, "1", (1, 2), seq_length=5)
