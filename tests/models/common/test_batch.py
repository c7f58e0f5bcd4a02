import pytest
import torch

from mcore_models import TokenBatch
from mcore_models.common import ResidualDropout
from mcore_parallel import RngKey


def test_samples_become_one_row_of_documents() -> None:
    tokens = torch.arange(6).reshape(2, 3)
    batch = TokenBatch.from_samples(tokens, labels=tokens + 1, loss_mask=torch.ones(2, 3))
    assert batch.num_tokens == 6
    assert batch.uniform == (2, 3)
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == [0, 3, 6]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.labels is not None
    assert batch.labels.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.rows is not None
    assert batch.rows.tolist() == [0, 1, 2, 3, 4, 5]


def test_packed_documents_count_positions_from_their_start() -> None:
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    batch = TokenBatch.from_samples(tokens, cu_seqlens=torch.tensor([0, 3, 3, 4, 8]))
    assert batch.uniform is None
    assert batch.max_seqlen == 4
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]


def test_rows_follow_the_sample_not_its_place() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    rows = TokenBatch.from_samples(tokens, sample_ids=[7, 2]).rows
    assert rows is not None
    assert rows.tolist() == [21, 22, 23, 6, 7, 8]


def test_moving_keeps_everything() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    batch = TokenBatch.from_samples(tokens, labels=tokens).to("meta")
    assert batch.tokens.is_meta
    assert batch.labels is not None
    assert batch.labels.is_meta
    assert (batch.uniform, batch.max_seqlen, batch.loss_mask) == ((2, 3), 3, None)


def test_wrong_shapes_and_bounds_are_refused() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="samples, length"):
        TokenBatch.from_samples(tokens[0])
    with pytest.raises(ValueError, match=r"rise from 0 to 6.*\[5\]"):
        TokenBatch.from_samples(tokens, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"labels has shape \(4,\) in a batch of 6"):
        TokenBatch.from_samples(tokens, labels=torch.zeros(4, dtype=torch.int64))


def test_dropout_of_a_slice_is_the_slice_of_the_dropout() -> None:
    hidden, rows = torch.ones(6, 64), torch.arange(6) + 100
    whole = ResidualDropout(probability=0.25, key=RngKey(3), rows=rows)
    half = ResidualDropout(probability=0.25, key=RngKey(3), rows=rows[2:5])
    assert torch.equal(whole(hidden, 4, "mlp")[2:5], half(hidden[2:5], 4, "mlp"))
    assert not torch.equal(whole(hidden, 4, "mlp"), whole(hidden, 5, "mlp"))
    values = whole(hidden, 0, "mlp").unique()
    torch.testing.assert_close(values, torch.tensor([0.0, 4 / 3]))
