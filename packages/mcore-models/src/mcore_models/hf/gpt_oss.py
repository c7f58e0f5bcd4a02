"""gpt-oss: attention with sinks, and experts whose gates and values alternate.

The weights of experts are published in MXFP4 (OCP "Microscaling Formats", 2023): 4-bit numbers in
blocks of 32 with a power of two for each. They are read, and written as plain numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.llama import NORMED, PLAIN, STACK, TIED, decoder_operators
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import Biases, Field, Only, Ours, with_defaults
from mcore_models.hf.windows import Windows, alternate
from mcore_parallel.mapping import (
    Exact,
    Inward,
    Operator,
    Rename,
    Stack,
    Transpose,
    Unstack,
)

_EXPERTS = "model.layers.{layer}.mlp.experts"
_OURS = "layers.{layer}.moe"
_NIBBLE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MXFP4 = "mxfp4"
_YARN = (
    ("rope_type", "yarn"),
    ("factor", 32.0),
    ("beta_fast", 32.0),
    ("beta_slow", 1.0),
    ("truncate", False),
    ("original_max_position_embeddings", 4096),
)


@dataclass(frozen=True)
class Quantised:
    """A `quantization_config` that is read, and not written: its weights become plain numbers."""

    method: str

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Check the method."""
        given = config.get("quantization_config")
        method = given.get("quant_method") if isinstance(given, Mapping) else given
        if method not in (None, self.method):
            raise ValueError(
                f"quantization_config={given!r} is not supported: only quant_method "
                f"{self.method!r} and none are"
            )

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Nothing."""


def _operators(model: ModelConfig) -> Iterator[Operator]:
    yield Inward(tuple(_decoding()))
    yield from decoder_operators(model)
    yield Rename("model.layers.{layer}.self_attn.sinks", "layers.{layer}.attention.sinks")
    yield Rename("model.layers.{layer}.mlp.router.{kind:weight|bias}", f"{_OURS}.router.{{kind}}")
    # Expert by expert, since the function needs whole tensors and a rank has some experts alone.
    one = tuple(f"{_OURS}.experts.{part}.weight.{{expert}}" for part in ("gate", "up"))
    yield Unstack(f"{_EXPERTS}.gate_up_proj", f"{_EXPERTS}.gate_up_proj.{{expert}}")
    yield Exact((f"{_EXPERTS}.gate_up_proj.{{expert}}",), one, _apart, _together)
    for part in one:
        yield Stack(part, part.removesuffix(".{expert}"))
    biases = tuple(f"{_OURS}.experts.{part}.bias" for part in ("gate", "up"))
    yield Exact((f"{_EXPERTS}.gate_up_proj_bias",), biases, _biases_apart, _biases_together)
    yield Transpose(f"{_EXPERTS}.down_proj", (0, 2, 1))
    yield Rename(f"{_EXPERTS}.down_proj", f"{_OURS}.experts.down.weight")
    yield Rename(f"{_EXPERTS}.down_proj_bias", f"{_OURS}.experts.down.bias")


def _apart(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """[H, 2F], gates in even columns, to gate and up [F, H]."""
    (fused,) = tensors
    return [fused[:, i::2].t().contiguous() for i in (0, 1)]


def _together(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    gate, up = tensors
    return [torch.stack((gate.t(), up.t()), dim=-1).flatten(1)]


def _biases_apart(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """[E, 2F] to [E, F] of gate and up."""
    (fused,) = tensors
    return [fused[:, i::2].contiguous() for i in (0, 1)]


def _biases_together(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    gate, up = tensors
    return [torch.stack((gate, up), dim=-1).flatten(1)]


def _decoding() -> Iterator[Operator]:
    """Yield what makes plain numbers of MXFP4."""
    weight = f"{_EXPERTS}.{{part:gate_up|down}}_proj"
    one = f"{weight}.{{expert}}"
    stored = (f"{weight}_blocks", f"{weight}_scales")
    for name in stored:
        yield Unstack(name, f"{name}.{{expert}}")
    yield Exact(tuple(f"{name}.{{expert}}" for name in stored), (one,), _decode, _no_encoding)
    yield Stack(one, weight)


def _decode(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Blocks [out, in / 32, 16] of two numbers a byte and scales [out, in / 32] to [in, out]."""
    blocks, scales = tensors
    magnitudes = torch.tensor(_NIBBLE, device=blocks.device)
    values = torch.cat((magnitudes, -magnitudes))
    pairs = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), dim=-1)
    scaled = torch.ldexp(pairs.flatten(-2), scales.int().unsqueeze(-1) - 127)
    return [scaled.flatten(1).t().contiguous().to(torch.bfloat16)]


def _no_encoding(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    raise AssertionError("weights are never written in MXFP4")


GPT_OSS = Architecture(
    name="GptOssForCausalLM",
    model_type="gpt_oss",
    rules=(
        *with_defaults(STACK, head_dim=64, num_key_value_heads=8, max_position_embeddings=131072),
        *with_defaults((rule for rule in NORMED if rule is not PLAIN), rms_norm_eps=1e-5),
        Quantised(_MXFP4),
        TIED,
        Biases(default=True),
        Field("num_local_experts", "moe.num_experts", int, default=128, also=("num_experts",)),
        Field("num_experts_per_tok", "moe.top_k", int, default=4, also=("experts_per_token",)),
        Field("intermediate_size", "moe.expert_ffn_size", int),
        Ours("moe.router_bias", True),
        Ours("moe.expert_bias", True),
        Only("hidden_act", "silu", absent="silu"),
        Only("swiglu_alpha", 1.702, absent=1.702),
        Field("swiglu_limit", "glu_limit", float, default=7.0),
        Ours("glu_offset", 1.0),
        Ours("activation", "quick_geglu"),
        Ours("attention.sinks", True),
        Windows(128, alternate),
        Rope(150000.0, default=_YARN),
    ),
    operators=_operators,
    unwritten=("quantization_config",),
)
"""`GptOssForCausalLM` (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025)."""
