"""Losses of layers: a gradient where they arise, and a value that is counted once."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mcore_models import AuxiliaryLosses, GlobalCounts


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_is_run_again_counts_once(reentrant: bool) -> None:
    auxiliary = AuxiliaryLosses(GlobalCounts(tokens=1), ("a",))
    weight = torch.tensor(3.0, requires_grad=True)

    def part(x: Tensor) -> Tensor:
        return auxiliary.attach(2 * x, "a", weight.square())

    x = torch.ones(2, requires_grad=True)
    out = checkpoint(part, x, use_reentrant=reentrant)
    out.sum().backward()
    assert auxiliary.shares() == {"a": 9.0}
    assert weight.grad == 6.0
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


def test_losses_are_known_by_name_on_every_rank() -> None:
    auxiliary = AuxiliaryLosses(GlobalCounts(tokens=1), ("a", "b"))
    with pytest.raises(ValueError, match="no auxiliary loss 'c': there are a, b"):
        auxiliary.attach(torch.ones(1), "c", torch.ones(()))
    assert list(auxiliary.shares()) == ["a", "b"]
