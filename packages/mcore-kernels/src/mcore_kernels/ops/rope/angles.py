"""Angles of the rotary position embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mcore_kernels.ops.rope.scaling import RopeScaling, plain_frequencies


def rope_cos_sin(
    positions: Tensor,
    rotary_dim: int,
    *,
    base: float = 10_000.0,
    scaling: RopeScaling | None = None,
    sections: tuple[int, ...] | None = None,
    interleaved_sections: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return float32 `(cos, sin)`, both [T, R/2], of the angles position · base^(-2i/R).

    Angles are taken in float64: in float32 those of position 100,000 are off by up to 0.004.

    Args:
        positions: [T], integers in any order, repeats allowed (packed documents, decoding); with
            `sections` [A, T], one row per axis (time, height, width).
        rotary_dim: R, how many elements of a head turn; even.
        base: above 1; the longest wavelength is 2π · base^((R-2)/R) tokens.
        scaling: changes the frequencies and puts a factor on cos and sin; None: neither.
        sections: how many pairs follow each axis (multi-section positions of Qwen2-VL); they add
            up to R/2. Pairs keep their frequencies.
        interleaved_sections: the axes take turns, pair by pair, for as long as each has pairs
            left; what remains follows the first (Qwen3-VL). Otherwise they come one after another.

    Raises:
        ValueError: R is not even and positive, base is not above 1, or positions and sections do
            not fit together.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(
            f"rope: rotary_dim turns pairs, so it is even and positive; got {rotary_dim}, "
            f"nearest {max(2, rotary_dim + 1)}"
        )
    if not 1.0 < base < math.inf:
        raise ValueError(f"rope: base must be a number above 1, got {base}")
    device = positions.device
    if scaling is None:
        frequency = plain_frequencies(rotary_dim, base, device)
    else:
        frequency = scaling.frequencies(rotary_dim, base, device)
    if sections is None:
        angle = torch.outer(positions.to(torch.float64), frequency)
    else:
        axes = _axes(sections, rotary_dim // 2, interleaved_sections)
        _check_sections(positions, sections, rotary_dim // 2)
        axis_of_pair = torch.tensor(axes, device=device)
        angle = positions.to(torch.float64)[axis_of_pair].t() * frequency
    cos, sin = angle.cos(), angle.sin()
    if scaling is not None and scaling.attention_factor != 1.0:
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    return cos.float(), sin.float()


def _axes(sections: tuple[int, ...], pairs: int, interleaved: bool) -> list[int]:
    """The axis that each pair follows."""
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    count = len(sections)
    return [i % count if i // count < sections[i % count] else 0 for i in range(pairs)]


def _check_sections(positions: Tensor, sections: tuple[int, ...], pairs: int) -> None:
    if sum(sections) != pairs:
        raise ValueError(
            f"rope: sections {sections} add up to {sum(sections)}, must be {pairs} pairs"
        )
    if positions.dim() != 2 or positions.shape[0] != len(sections):
        raise ValueError(
            f"rope: {len(sections)} sections need positions [{len(sections)}, T], got "
            f"{list(positions.shape)}"
        )
