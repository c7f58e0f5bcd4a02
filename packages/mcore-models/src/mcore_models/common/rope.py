"""Rotary angles of a batch. T tokens, R channels of a head that turn, A axes of positions."""

import torch
from torch import Tensor

from mcore_kernels import rope_cos_sin
from mcore_models.common.batch import TokenBatch
from mcore_models.config import ModelConfig
from mcore_parallel import Group, all_reduce


def rotary_angles(config: ModelConfig, batch: TokenBatch, cp: Group) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R/2] fp32 of the model's rotary positions.

    Where scaling depends on the length of a document, communicates over `cp`, whose ranks hold
    shares of each.
    """
    rope, size = config.rope, config.rotary_size
    within, beyond = rope.scalings()
    positions = batch.positions
    if rope.sections is not None:
        axes = batch.axis_positions
        positions = positions.expand(len(rope.sections), -1) if axes is None else axes.t()
    angles = [
        rope_cos_sin(
            positions,
            size,
            base=config.rope_base,
            scaling=scaling,
            sections=rope.sections,
            interleaved_sections=rope.interleaved_sections,
        )
        for scaling in dict.fromkeys((within, beyond))
    ]
    if len(angles) == 1:
        return angles[0]
    assert rope.original_length is not None
    is_longer = (_lengths(batch, cp) > rope.original_length).unsqueeze(-1)
    (cos, sin), (long_cos, long_sin) = angles
    return torch.where(is_longer, long_cos, cos), torch.where(is_longer, long_sin, sin)


def local_rotary_angles(config: ModelConfig, batch: TokenBatch) -> tuple[Tensor, Tensor] | None:
    """The same of local layers, where these have a base of their own."""
    base = config.attention.local_rope_base
    if base is None:
        return None
    return rope_cos_sin(batch.positions, config.rotary_size, base=base)


def _lengths(batch: TokenBatch, cp: Group) -> Tensor:
    """How long the document of each token [T] is, as far as it is known."""
    documents = batch.documents()
    last = batch.positions.new_zeros(max(batch.num_documents, 1))
    last = last.scatter_reduce(0, documents, batch.positions, "amax")
    if cp.size > 1:
        last = all_reduce(last, cp, op="max")
    return last[documents] + 1
