from dataclasses import dataclass, fields

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


def test_shares_of_samples() -> None:
    tokens = torch.arange(16).reshape(2, 8)
    batch = TokenBatch.from_samples(tokens, labels=tokens + 1)
    assert batch.share(0, 1) is batch
    early, late = (batch.share(rank, 2) for rank in range(2))
    assert early.tokens.tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert late.tokens.tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    assert early.positions.tolist() == [0, 1, 6, 7] * 2
    assert (early.uniform, early.max_seqlen, early.shares) == ((2, 4), 4, 2)
    assert early.cu_seqlens.tolist() == [0, 4, 8]
    assert early.loss_mask is None  # nothing was added
    assert early.rows is not None
    assert torch.equal(early.rows, early.tokens)
    with pytest.raises(ValueError, match="one of 2 shares already"):
        early.share(0, 2)
    with pytest.raises(ValueError, match="rank 2 is not one of the 2"):
        batch.share(2, 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighted(TokenBatch):
    """A batch that carries more."""

    weights: torch.Tensor


@pytest.mark.parametrize("multiple", [1, 4])
def test_shares_of_packed_documents_are_padded(multiple: int) -> None:
    """U29: documents of 5 and 3 tokens become 8 and 4; what is added counts nowhere."""
    whole = TokenBatch.from_samples(
        torch.arange(1, 9)[None], cu_seqlens=torch.tensor([0, 5, 8]), sample_ids=[3]
    )
    values = {f.name: getattr(whole, f.name) for f in fields(whole)}
    batch = Weighted(**values, weights=torch.arange(1.0, 9.0))
    shares = [batch.share(rank, 2, multiple=multiple) for rank in range(2)]
    found = {}
    for share in shares:
        assert isinstance(share, Weighted)
        assert share.num_tokens == (8 if multiple == 4 else 6)
        assert share.cu_seqlens.tolist() == [0, 4, 6]
        assert (share.uniform, share.max_seqlen, share.shares) == (None, 4, 2)
        assert share.loss_mask is not None
        assert share.rows is not None
        for row in range(share.num_tokens):
            token = int(share.tokens[row])
            assert float(share.loss_mask[row]) == (token > 0)
            assert float(share.weights[row]) == token
            if token:
                found[token] = int(share.positions[row]), int(share.rows[row])
    positions = [0, 1, 2, 3, 4, 0, 1, 2]
    assert found == {i + 1: (positions[i], 24 + i) for i in range(8)}


def test_dropout_of_a_slice_is_the_slice_of_the_dropout() -> None:
    hidden, rows = torch.ones(6, 64), torch.arange(6) + 100
    whole = ResidualDropout(probability=0.25, key=RngKey(3), rows=rows)
    half = ResidualDropout(probability=0.25, key=RngKey(3), rows=rows[2:5])
    assert torch.equal(whole(hidden, 4, "mlp")[2:5], half(hidden[2:5], 4, "mlp"))
    assert not torch.equal(whole(hidden, 4, "mlp"), whole(hidden, 5, "mlp"))
    values = whole(hidden, 0, "mlp").unique()
    torch.testing.assert_close(values, torch.tensor([0.0, 4 / 3]))
