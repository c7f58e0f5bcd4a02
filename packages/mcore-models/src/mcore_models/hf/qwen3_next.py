"""Qwen3-Next: gated delta nets, gated attention in every few layers, and experts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.blocks import DecodeBlocks, or_blocks
from mcore_models.hf.experts import expert_operators
from mcore_models.hf.llama import DRESS, SIZES, TIED, decoder_operators
from mcore_models.hf.qwen import SparseLayers
from mcore_models.hf.recurrent import conv_operators, drop_below
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import Field, Only, Ours, with_defaults
from mcore_parallel.mapping import Inward, Operator, Rename, Reshape, Split

_INTERVAL = 4
_KINDS = {"linear_attention": "G", "full_attention": "*"}


@dataclass(frozen=True)
class _Mixers:
    """Which layers attend: listed, or every `full_attention_interval`-th."""

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set the mixers of `pattern`."""
        layers = fields["num_layers"]
        mixers = self._mixers(config, layers)
        if len(mixers) != layers or set(mixers) != set(_KINDS.values()):
            raise ValueError(
                f"layer_types of {layers} layers are {''.join(mixers)!r} (G for linear attention): "
                f"there must be one of each layer, and both kinds"
            )
        before = fields.get("pattern") or ("*E",) * layers
        fields["pattern"] = tuple(m + letters[1] for m, letters in zip(mixers, before, strict=True))

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """List them, unless `config` says so already."""
        mixers = [letters[0] for letters in model.layer_pattern]
        if set(mixers) <= set(_KINDS.values()) and self._mixers(config, len(mixers)) != mixers:
            names = {letter: name for name, letter in _KINDS.items()}
            config["layer_types"] = [names[mixer] for mixer in mixers]

    def _mixers(self, config: Mapping[str, Any], layers: int) -> list[str]:
        given = config.get("layer_types")
        if given is None:
            interval = config.get("full_attention_interval") or _INTERVAL
            if type(interval) is not int or interval < 1:
                raise ValueError(f"full_attention_interval={interval!r} must be at least 1")
            return ["G" if (i + 1) % interval else "*" for i in range(layers)]
        if not isinstance(given, list) or not all(kind in _KINDS for kind in given):
            raise ValueError(
                f"layer_types={given!r} is not supported: a list of {' and '.join(_KINDS)}"
            )
        return [_KINDS[kind] for kind in given]


def _operators(model: ModelConfig) -> Iterator[Operator]:
    layer, own = "model.layers.{layer}", "layers.{layer}"
    yield Inward((DecodeBlocks(),))
    yield from drop_below("mtp")  # predicts further tokens
    yield from _gate_operators(model, f"{layer}.self_attn.q_proj.weight", f"{own}.attention")
    yield from decoder_operators(model)
    yield from _delta_net_operators(model, f"{layer}.linear_attn", f"{own}.delta_net")
    yield from expert_operators()
    yield Rename(
        f"{layer}.mlp.shared_expert.{{part:gate|up|down}}_proj.weight",
        f"{own}.moe.shared.{{part}}.weight",
    )
    yield Rename(f"{layer}.mlp.shared_expert_gate.weight", f"{own}.moe.shared_gate.weight")


def _gate_operators(model: ModelConfig, q_proj: str, ours: str) -> Iterator[Operator]:
    """Yield the operators that take the gate out of `q_proj`, where it follows the rows of q in
    each head; q stays under that name."""
    heads, size, hidden = model.num_heads, model.head_size, model.hidden_size
    gate = f"{ours}.gate.weight"
    yield Reshape(q_proj, (heads * 2 * size, hidden), (heads, 2 * size, hidden))
    yield Split(q_proj, (q_proj, gate), dim=1)
    for name in (q_proj, gate):
        yield Reshape(name, (heads, size, hidden), (heads * size, hidden))


def _delta_net_operators(model: ModelConfig, theirs: str, ours: str) -> Iterator[Operator]:
    """Yield the operators for a delta net, of which theirs fuses projections by key heads."""
    delta, hidden = model.delta_net, model.hidden_size
    assert delta is not None
    keys, share = delta.num_key_heads, delta.num_value_heads // delta.num_key_heads
    size, values = delta.key_head_dim, share * delta.value_head_dim
    fused = {
        "in_proj_qkvz": {"q": size, "k": size, "v": values, "z": values},
        "in_proj_ba": {"beta": share, "alpha": share},
    }
    for name, parts in fused.items():
        whole, rows = f"{theirs}.{name}.weight", sum(parts.values())
        yield Reshape(whole, (keys * rows, hidden), (keys, rows, hidden))
        named = {f"{ours}.{part}.weight": rows for part, rows in parts.items()}
        yield Split(whole, tuple(named), tuple(named.values()), dim=1)
        for part, rows in named.items():
            yield Reshape(part, (keys, rows, hidden), (keys * rows, hidden))
    convolved = {"q": delta.key_size, "k": delta.key_size, "v": delta.value_size}
    yield from conv_operators(f"{theirs}.conv1d", ours, convolved, delta.conv_width)
    yield Rename(f"{theirs}.A_log", f"{ours}.a_log")
    yield Rename(f"{theirs}.dt_bias", f"{ours}.dt_bias")
    yield Rename(f"{theirs}.norm.weight", f"{ours}.norm.weight")
    yield Rename(f"{theirs}.out_proj.weight", f"{ours}.out.weight")


QWEN3_NEXT = Architecture(
    name="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    rules=(
        *with_defaults(SIZES, num_key_value_heads=2, head_dim=256, max_position_embeddings=32768),
        *or_blocks(DRESS),
        TIED,
        Only("attention_bias", False, absent=False),
        Ours("zero_centered_norm", True),
        Ours("attention.qk_norm", "head"),
        Ours("attention.gate", True),
        Field("linear_num_key_heads", "delta_net.num_key_heads", int, default=16),
        Field("linear_num_value_heads", "delta_net.num_value_heads", int, default=32),
        Field("linear_key_head_dim", "delta_net.key_head_dim", int, default=128),
        Field("linear_value_head_dim", "delta_net.value_head_dim", int, default=128),
        Field("linear_conv_kernel_dim", "delta_net.conv_width", int, default=4),
        Field("num_experts", "moe.num_experts", int, default=512, also=("num_local_experts",)),
        Field("num_experts_per_tok", "moe.top_k", int, default=10),
        Field("moe_intermediate_size", "moe.expert_ffn_size", int, default=512),
        Field("shared_expert_intermediate_size", "moe.shared_ffn_size", int, default=512),
        Field("norm_topk_prob", "moe.normalise_top_k", bool, default=True),
        Ours("moe.shared_gate", True),
        SparseLayers(),
        _Mixers(),
        Rope(default_share=0.25),
    ),
    operators=_operators,
    unwritten=("quantization_config",),
)
"""`Qwen3NextForCausalLM` (Qwen Team, "Qwen3-Next", 2025)."""
