"""Hugging Face architectures: config.json and tensor names, in both directions."""

from collections.abc import Mapping

from mcore_models.hf.architecture import Architecture
from mcore_models.hf.llama import DRESS, LLAMA, SIZES, decoder_operators
from mcore_models.hf.rules import REQUIRED, AllBiases, Field, Only, Ours, Rope, Rule, in_force

ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.name: architecture for architecture in (LLAMA,)
}
"""The architectures that this package knows, by the name that `config.json` has for them."""

__all__ = [
    "ARCHITECTURES",
    "DRESS",
    "LLAMA",
    "REQUIRED",
    "SIZES",
    "AllBiases",
    "Architecture",
    "Field",
    "Only",
    "Ours",
    "Rope",
    "Rule",
    "decoder_operators",
    "in_force",
]
