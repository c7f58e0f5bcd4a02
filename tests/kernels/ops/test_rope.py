"""Angles, and what rotation preserves."""

import math

import pytest
import torch

from mcore_kernels import (
    Kernels,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
    rope_cos_sin,
)

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
        (8, 0.0, "base must be a number above 1, got 0.0"),
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


def _published(kind: str, parameters: dict[str, object]) -> tuple[torch.Tensor, float]:
    """What transformers computes for a head of 128 with base 500,000."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": kind, "rope_theta": 500_000.0, **parameters},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies, factor


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 40.0, "original_max_position_embeddings": 4096}
FACTORS = tuple(1.0 + 0.1 * i for i in range(64))
LONG = {
    "short_factor": list(FACTORS),
    "long_factor": [1.0] * 64,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("kind", "parameters", "scaling"),
    [
        ("linear", {"factor": 4.0}, LinearScaling(factor=4.0)),
        (
            "llama3",
            LLAMA3,
            Llama3Scaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192
            ),
        ),
        ("yarn", YARN, YarnScaling(factor=40.0, original_length=4096)),
        (
            "yarn",
            {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0, "truncate": False},
            YarnScaling(
                factor=40.0,
                original_length=4096,
                mscale=1.0,
                mscale_all_dim=0.5,
                beta_fast=16.0,
                truncate=False,
            ),
        ),
        (
            "yarn",
            {**YARN, "attention_factor": 1.25},
            YarnScaling(factor=40.0, original_length=4096, given_attention_factor=1.25),
        ),
        (
            "longrope",
            LONG,
            LongRopeScaling(factors=FACTORS, extension=32.0, original_length=4096),
        ),
        (
            "longrope",
            {**LONG, "attention_factor": 1.25},
            LongRopeScaling(
                factors=FACTORS, extension=32.0, original_length=4096, given_attention_factor=1.25
            ),
        ),
    ],
)
def test_scaled_angles_are_those_of_transformers(
    kind: str, parameters: dict[str, object], scaling: RopeScaling
) -> None:
    wanted, factor = _published(kind, parameters)
    found = scaling.frequencies(128, 500_000.0, torch.device("cpu"))
    torch.testing.assert_close(found.float(), wanted, rtol=3e-6, atol=0.0)
    assert scaling.attention_factor == pytest.approx(factor)
    positions = torch.tensor([0, 17, 90_000])
    cos, sin = rope_cos_sin(positions, 128, base=500_000.0, scaling=scaling)
    angle = torch.outer(positions.double(), found)
    torch.testing.assert_close(cos, (angle.cos() * factor).float())
    torch.testing.assert_close(sin, (angle.sin() * factor).float())


@pytest.mark.parametrize("interleaved", [False, True])
def test_sections_follow_their_axes(interleaved: bool) -> None:
    """Pair by pair, as Qwen2-VL cuts them (24, 20, 20) and as Qwen3-VL deals them out."""
    positions = torch.stack([torch.arange(5), torch.arange(5) * 7, torch.arange(5) * 31])
    sections = (24, 20, 20)
    cos, sin = rope_cos_sin(
        positions, 128, base=1e6, sections=sections, interleaved_sections=interleaved
    )
    alone = [rope_cos_sin(row, 128, base=1e6) for row in positions]
    for pair in range(64):
        if interleaved:
            axis = pair % 3 if pair < 60 else 0
        else:
            axis = 0 if pair < 24 else 1 if pair < 44 else 2
        assert torch.equal(cos[:, pair], alone[axis][0][:, pair]), pair
        assert torch.equal(sin[:, pair], alone[axis][1][:, pair]), pair
    same = rope_cos_sin(positions[:1].expand(3, 5), 128, base=1e6, sections=sections)
    assert torch.equal(same[0], alone[0][0])  # text has one position on all axes


@pytest.mark.parametrize(
    ("sections", "shape", "message"),
    [
        ((2, 1), (2, 3), r"sections \(2, 1\) add up to 3, must be 4 pairs"),
        ((2, 2), (3, 3), r"2 sections need positions \[2, T\], got \[3, 3\]"),
        ((2, 2), (3,), r"2 sections need positions \[2, T\], got \[3\]"),
    ],
)
def test_sections_that_do_not_fit(
    sections: tuple[int, ...], shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rope_cos_sin(torch.zeros(shape, dtype=torch.int64), 8, sections=sections)


def test_scalings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"factor of linear scaling must be at least 1, got 0.5"):
        LinearScaling(factor=0.5)
    with pytest.raises(ValueError, match="low_freq_factor < high_freq_factor, got 4 and 1"):
        Llama3Scaling(factor=8, low_freq_factor=4, high_freq_factor=1, original_length=8192)
    with pytest.raises(ValueError, match="beta_slow <= beta_fast, got 2 and 1"):
        YarnScaling(factor=8, original_length=8192, beta_slow=2, beta_fast=1)
    scaling = LongRopeScaling(factors=(1.0, 2.0), extension=4.0, original_length=4096)
    with pytest.raises(ValueError, match="2 factors for 4 pairs"):
        rope_cos_sin(torch.arange(3), 8, scaling=scaling)
    with pytest.raises(ValueError, match="length of yarn scaling must be at least 2, got 0"):
        YarnScaling(factor=8, original_length=0)
    with pytest.raises(ValueError, match=r"longrope scaling are positive, got \(0.0, 1.0\)"):
        LongRopeScaling(factors=(0.0, 1.0), extension=4.0, original_length=4096)


def test_in_place_in_parts_of_one_tensor() -> None:
    qkv = torch.randn(5, 6, 8)
    cos, sin = rope_cos_sin(torch.arange(5), 8)
    wanted = rope(qkv[:, :3], qkv[:, 3:5], cos, sin)
    kept = qkv[:, 5].clone()
    rope.inplace(qkv[:, :3], qkv[:, 3:5], cos, sin)
    assert torch.equal(qkv[:, :3], wanted[0])
    assert torch.equal(qkv[:, 3:5], wanted[1])
    assert torch.equal(qkv[:, 5], kept)


def test_in_place_where_a_gradient_is_asked_for() -> None:
    q, k = torch.randn(3, 2, 8, requires_grad=True), torch.randn(3, 1, 8)
    with pytest.raises(ValueError, match=r"without autograd, under torch.no_grad"):
        rope.inplace(q, k, *rope_cos_sin(torch.arange(3), 8))
    with torch.no_grad():
        rope.inplace(q, k, *rope_cos_sin(torch.arange(3), 8))
