"""Weights in blocks of 8-bit numbers with a scale each, as DeepSeek-V3 is published."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mcore_parallel.mapping import Operator
from mcore_parallel.mapping.tensors import Tensors

BLOCK = 128
_SCALE = ".weight_scale_inv"


@dataclass(frozen=True)
class DecodeBlocks(Operator):
    """`….weight` in float8_e4m3fn times `….weight_scale_inv`, to bfloat16; for the way in alone.

    A scale is that of 128 x 128 elements; blocks at the lower and right edge may be smaller. The
    product is taken in float32 and rounded once (DeepSeek-AI, arXiv:2412.19437, 3.3.2). Tensors
    without scales stay as they are.
    """

    def forward(self, tensors: Tensors) -> None:
        """Replace each pair by the weight."""
        for scale in [name for name in tensors.entries if name.endswith(_SCALE)]:
            weight = scale.removesuffix(_SCALE) + ".weight"
            if weight not in tensors.entries:
                raise ValueError(f"{weight} is missing, which belongs with {scale}")
            rows, columns = tensors.entries[weight].shape
            wanted = -(-rows // BLOCK), -(-columns // BLOCK)
            found = tensors.entries[scale].shape
            if found != wanted:
                raise ValueError(
                    f"{scale} has shape {list(found)}, and {weight} of shape {[rows, columns]} has "
                    f"{list(wanted)} blocks of {BLOCK} x {BLOCK}"
                )
            tensors.apply(decode, [weight, scale], [weight])

    def inverse(self, tensors: Tensors) -> None:
        """Nothing: weights are written as they are."""


def decode(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The weight [rows, columns] in bfloat16, from its numbers and its scales."""
    numbers, scales = tensors
    rows, columns = numbers.shape
    scale = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return ((numbers.float() * scale.float()).bfloat16(),)
