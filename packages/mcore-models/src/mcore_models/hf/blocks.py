"""Weights in blocks of 8-bit numbers with a scale each, as DeepSeek-V3 and Qwen3 are published."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mcore_models.config import ModelConfig
from mcore_models.hf.llama import PLAIN
from mcore_models.hf.rules import Rule
from mcore_parallel.mapping import Operator
from mcore_parallel.mapping.tensors import Tensors

BLOCK = 128
_SCALE = ".weight_scale_inv"


@dataclass(frozen=True)
class Blocks:
    """Weights in blocks of 8-bit numbers, each with a scale, or none that are.

    To be had together with `DecodeBlocks`, and with "quantization_config" among what an
    architecture leaves unwritten.
    """

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Check the form."""
        given = config.get("quantization_config")
        if given is None:
            return
        if not isinstance(given, Mapping) or given.get("quant_method") != "fp8":
            raise ValueError(f"quantization_config={given!r} is not supported: only fp8 blocks are")
        size = given.get("weight_block_size")
        if size != [BLOCK, BLOCK]:
            raise ValueError(
                f"quantization_config.weight_block_size={size!r} is not supported: "
                f"only {[BLOCK, BLOCK]} is"
            )

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Nothing: what is written is not quantised."""


def or_blocks(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return rules that let weights be in blocks where they want them plain."""
    return tuple(Blocks() if rule is PLAIN else rule for rule in rules)


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
