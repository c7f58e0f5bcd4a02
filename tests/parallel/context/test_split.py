"""The zigzag split: every row once, an early and a late chunk each, and the way back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel import Group
from mcore_parallel.context import DocumentPadding, SequenceSplit, padded_length
from mcore_parallel.testing import RankPool

SIZES = st.integers(1, 6)
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=5)


def test_the_pairing() -> None:
    split = SequenceSplit(bounds=(0, 8, 12), size=2)
    assert split.rows(0).tolist() == [0, 1, 6, 7, 8, 11]
    assert split.rows(1).tolist() == [2, 3, 4, 5, 9, 10]
    assert split.local_bounds == (0, 4, 6)
    assert SequenceSplit.of_samples(2, 4, 2) == SequenceSplit(bounds=(0, 4, 8), size=2)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, size=SIZES)
def test_shares_and_padding_have_inverses(lengths: list[int], size: int) -> None:
    padding = DocumentPadding(lengths=tuple(lengths), size=size)
    split = padding.split
    real = torch.arange(1, sum(lengths) + 1)
    padded = padding.pad(real, -1)
    assert len(padded) == split.num_rows < sum(lengths) + 2 * size * len(lengths)
    assert int((padded == -1).sum()) == len(padded) - len(real)
    assert torch.equal(padding.unpad(padded), real)
    shares = [split.take(padded, rank) for rank in range(size)]
    assert {len(share) for share in shares} == {split.local_bounds[-1]}
    assert torch.equal(split.join(shares), padded)
    assert torch.equal(torch.cat(shares).index_select(0, split.order()), padded)
    held = torch.cat([split.rows(rank) for rank in range(size)])
    assert torch.equal(held.sort().values, torch.arange(split.num_rows))
    # What a causal mask makes of it: the same number of pairs for every rank.
    starts = torch.tensor(split.bounds[:-1])
    document = torch.searchsorted(
        torch.tensor(split.bounds), torch.arange(split.num_rows), right=True
    )
    position = torch.arange(split.num_rows) - starts[document - 1]
    pairs = {int((position[split.rows(rank)] + 1).sum()) for rank in range(size)}
    assert len(pairs) == 1
    for rank in range(size):  # inside a document a rank's rows stay in order
        rows = split.rows(rank)
        assert bool((rows.diff() > 0).all())


def test_lengths_that_ranks_can_share() -> None:
    """U29: 5 and 3 become 8 and 4; 698 becomes 700 over two ranks and 704 over four."""
    assert [padded_length(n, 2) for n in (5, 3, 698, 0)] == [8, 4, 700, 0]
    assert padded_length(698, 4) == 704
    assert padded_length(698, 1) == 698
    padding = DocumentPadding(lengths=(5, 3), size=2)
    assert padding.split.bounds == (0, 8, 12)
    assert padding.rows().tolist() == [0, 1, 2, 3, 4, 8, 9, 10]


def test_gradients_go_through_padding_and_shares() -> None:
    padding = DocumentPadding(lengths=(5, 3), size=2)
    x = torch.arange(8.0).requires_grad_()
    padded = padding.pad(x)
    shares = [padding.split.take(padded, rank) for rank in range(2)]
    whole = padding.unpad(padding.split.join(shares))
    (whole * torch.arange(8.0)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == list(range(8))
    assert torch.equal(whole, x)


def gathered() -> bool:
    group = Group.world()
    split = SequenceSplit(bounds=(0, 12, 12, 30), size=group.size)
    whole = torch.randn(2, 30, 3, generator=torch.Generator().manual_seed(3))
    mine = split.take(whole, group.rank, dim=1)
    return torch.equal(split.gather(mine, group, dim=1), whole)


def test_gathering_over_ranks(ranks: RankPool) -> None:
    assert ranks.run(gathered, 3) == [True] * 3


def test_what_is_not_a_split() -> None:
    with pytest.raises(ValueError, match=r"document 1 of length 6 .* 2 × 2 = 4 chunks.*: 4 and 8"):
        SequenceSplit(bounds=(0, 4, 10), size=2)
    with pytest.raises(ValueError, match=r"document 0 of length 3 .* lengths: 8"):
        SequenceSplit(bounds=(0, 3), size=4)
    for bounds in ((), (0,), (1, 5), (0, 8, 4)):
        with pytest.raises(ValueError, match="must rise from 0"):
            SequenceSplit(bounds=bounds, size=1)
    with pytest.raises(ValueError, match="size is 0"):
        SequenceSplit(bounds=(0, 4), size=0)
    split = SequenceSplit(bounds=(0, 8), size=2)
    with pytest.raises(ValueError, match="rank 2 is not one of the 2"):
        split.rows(2)
    with pytest.raises(ValueError, match="has not the 8 rows of all ranks"):
        split.take(torch.zeros(4), 0)
    with pytest.raises(ValueError, match="got 1 shares of a split over 2"):
        split.join([torch.zeros(4)])
    with pytest.raises(ValueError, match="has not the 4 rows of one rank"):
        split.join([torch.zeros(4), torch.zeros(5)])
    with pytest.raises(ValueError, match="of 1 ranks cannot gather a split over 2"):
        split.gather(torch.zeros(4), Group.single())
    with pytest.raises(ValueError, match="does not hold documents of 8 rows"):
        DocumentPadding(lengths=(5, 3), size=2).pad(torch.zeros(9))
    with pytest.raises(ValueError, match="must not be negative"):
        DocumentPadding(lengths=(5, -3), size=2)
