"""Angles, and what rotation preserves."""

import math

import pytest
import torch

from mcore_kernels import Kernels, rope_cos_sin

rope = Kernels().rope


def test_angles_are_position_times_frequency() -> None:
    cos, sin = rope_cos_sin(torch.tensor([0, 3, 3, 100_000]), 6, base=500.0)
    assert cos.dtype == sin.dtype == torch.float32
    for row, position in enumerate((0, 3, 3, 100_000)):
        for i in range(3):
            angle = position * 500.0 ** (-2 * i / 6)
            assert cos[row, i].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[row, i].item() == pytest.approx(math.sin(angle), abs=1e-7)


@pytest.mark.parametrize(
    ("rotary", "base", "message"),
    [
        (7, 1e4, "it is even and positive; got 7, nearest 8"),
        (0, 1e4, "got 0, nearest 2"),
        (8, 0.0, "base must be positive, got 0.0"),
    ],
)
def test_angles_that_cannot_be(rotary: int, base: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_cos_sin(torch.arange(3), rotary, base=base)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_only(interleaved: bool) -> None:
    q, k = torch.randn(1, 2, 16).double(), torch.randn(1, 2, 16).double()

    def score(i: int, j: int) -> torch.Tensor:
        turned_q, _ = rope(q, k, *rope_cos_sin(torch.tensor([i]), 12), interleaved)
        _, turned_k = rope(q, k, *rope_cos_sin(torch.tensor([j]), 12), interleaved)
        return (turned_q * turned_k).sum(-1)

    torch.testing.assert_close(score(7, 3), score(107, 103), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(score(7, 3), score(7, 4))


def test_the_two_pairings_are_a_permutation_apart() -> None:
    q = torch.randn(5, 1, 8)
    cos, sin = rope_cos_sin(torch.arange(5), 8)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    half, _ = rope(q[..., order], q, cos, sin)
    pairs, _ = rope(q, q, cos, sin, True)
    torch.testing.assert_close(half, pairs[..., order])


def test_only_what_needs_a_gradient_gets_one() -> None:
    q, k = torch.randn(3, 2, 8, requires_grad=True), torch.randn(3, 1, 8)
    cos, sin = rope_cos_sin(torch.arange(3), 8)
    turned, _ = rope(q, k, cos, sin)
    turned.sum().backward()
    assert q.grad is not None
    assert k.grad is None


def test_inputs_are_left_alone() -> None:
    q, k = torch.randn(3, 2, 8), torch.randn(3, 1, 8)
    kept = q.clone(), k.clone()
    rope(q, k, *rope_cos_sin(torch.arange(3), 6))
    assert torch.equal(q, kept[0])
    assert torch.equal(k, kept[1])


def test_sizes_that_do_not_fit() -> None:
    q, k = torch.randn(3, 2, 8), torch.randn(3, 1, 8)
    with pytest.raises(ValueError, match="turn 10 elements of a head, which has 8; at most 4"):
        rope(q, k, *rope_cos_sin(torch.arange(3), 10))
    with pytest.raises(ValueError, match="one row per token, got 3, 3 and 4"):
        rope(q, k, *rope_cos_sin(torch.arange(4), 8))
