import numpy as np
import pytest

from mcore_data import MockDataset, MockDocuments, TokenBatchLoader, TokenBatchSampler


def test_samples_are_functions_of_seed_and_number():
    one, two = MockDataset(9, 50, 7, 3), MockDataset(9, 50, 7, 3)
    assert one[4].tokens.tolist() == two[4].tokens.tolist()
    assert one[4].tokens.tolist() != one[5].tokens.tolist()
    assert MockDataset(9, 50, 7, 4)[4].tokens.tolist() != one[4].tokens.tolist()
    assert one[4].labels[:-1].tolist() == one[4].tokens[1:].tolist()
    assert set(np.concatenate([one[i].labels for i in range(9)]).tolist()) == set(range(7))
    assert one[0].cu_seqlens.tolist() == [0, 50]
    with pytest.raises(IndexError, match="sample 9 of 9"):
        one[9]


def test_documents_in_a_sample():
    dataset = MockDataset(40, 200, 7, 3, mean_document=10)
    counts = [len(dataset[i].cu_seqlens) - 1 for i in range(40)]
    assert abs(np.mean(counts) - (1 + 199 / 10)) < 3
    sample = dataset[0]
    assert sample.positions[sample.cu_seqlens[:-1]].tolist() == [0] * counts[0]
    assert (np.diff(sample.cu_seqlens) > 0).all()
    assert MockDataset(1, 5, 7, 3, mean_document=1)[0].cu_seqlens.tolist() == [0, 1, 2, 3, 4, 5]


def test_samples_of_any_length():
    dataset = MockDocuments(300, 64, 11, 5)
    assert dataset.lengths.min() >= 1
    assert dataset.lengths.max() <= 64
    assert abs(np.median(dataset.lengths) - 8) <= 3
    assert [len(dataset[i].tokens) for i in range(300)] == dataset.lengths.tolist()
    sampler = TokenBatchSampler(dataset.lengths, 256)
    with TokenBatchLoader(dataset, sampler, dp_rank=0, dp_size=2, max_tokens=64) as loader:
        assert all(len(batch["tokens"]) <= 64 for batch in next(loader))


def test_bad_arguments():
    for arguments in ((0, 5, 5, 0), (5, 0, 5, 0), (5, 5, 0, 0)):
        for kind in (MockDataset, MockDocuments):
            with pytest.raises(ValueError, match="must be at least 1"):
                kind(*arguments)
    with pytest.raises(ValueError, match=r"mean_document 0.5 must be at least 1"):
        MockDataset(5, 5, 5, 0, mean_document=0.5)
