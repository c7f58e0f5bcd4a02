"""Two dresses of the decoder and published models by name.

Sources: Touvron et al., "LLaMA" (2023) and the Llama 3 model card; Radford et al., "Language Models
are Unsupervised Multitask Learners" (2019); the SmolLM2 and TinyLlama model cards; Jiang et al.,
"Mixtral of Experts" (2024) and the configurations of its releases.
"""

import difflib
from dataclasses import replace
from functools import partial

from mcore_models.attention_presets import ATTENTION_PRESETS
from mcore_models.config import ModelConfig
from mcore_models.encoder_presets import ENCODER_PRESETS
from mcore_models.latent_presets import LATENT_PRESETS
from mcore_models.parts import MoEConfig
from mcore_models.recurrent_presets import RECURRENT_PRESETS


def llama(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    ffn_size: int | None = None,
    max_positions: int = 2048,
    norm_eps: float = 1e-5,
    rope_base: float = 10000.0,
    tied_embeddings: bool = False,
    init_std: float = 0.02,
    dropout: float = 0.0,
) -> ModelConfig:
    """A LLaMA-style decoder: RMSNorm, SwiGLU, rotary positions, grouped queries, no biases."""
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=ffn_size,
        max_positions=max_positions,
        norm="rms_norm",
        norm_eps=norm_eps,
        activation="swiglu",
        position="rope",
        rope_base=rope_base,
        tied_embeddings=tied_embeddings,
        init_std=init_std,
        dropout=dropout,
    )


def gpt2(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    ffn_size: int | None = None,
    max_positions: int = 1024,
    norm_eps: float = 1e-5,
    tied_embeddings: bool = True,
    init_std: float = 0.02,
    dropout: float = 0.0,
) -> ModelConfig:
    """A GPT-2-style decoder: LayerNorm, tanh GELU, learned positions, biases, tied embeddings."""
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        ffn_size=ffn_size,
        max_positions=max_positions,
        norm="layer_norm",
        norm_eps=norm_eps,
        activation="gelu_tanh",
        position="learned",
        linear_bias=True,
        tied_embeddings=tied_embeddings,
        init_std=init_std,
        dropout=dropout,
    )


def preset_names() -> tuple[str, ...]:
    """Names that `preset` knows, in the order of the table."""
    return tuple(_PRESETS)


def preset(name: str) -> ModelConfig:
    """The architecture published as `name`.

    Dropout is 0 in all of them (published GPT-2 was trained with 0.1); use
    `dataclasses.replace(preset("gpt2"), dropout=0.1)`.

    Raises:
        ValueError: for an unknown name, naming the nearest one.
    """
    if name not in _PRESETS:
        close = difflib.get_close_matches(name, _PRESETS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"no preset {name!r}: did you mean {close!r}? All: {', '.join(preset_names())}"
        )
    return _PRESETS[name]


_gpt2 = partial(gpt2, vocab_size=50257, max_positions=1024)
_llama2 = partial(llama, vocab_size=32000, max_positions=4096)
_llama3 = partial(llama, vocab_size=128256, max_positions=8192, rope_base=5e5, num_kv_heads=8)
_smollm2 = partial(llama, vocab_size=49152, max_positions=8192, rope_base=1e5, tied_embeddings=True)
_mixtral = partial(llama, vocab_size=32000, num_kv_heads=8, rope_base=1e6)

_LLAMA3_8B = _llama3(hidden_size=4096, num_layers=32, num_heads=32, ffn_size=14336)

_PRESETS = {
    "gpt2": _gpt2(hidden_size=768, num_layers=12, num_heads=12),
    "gpt2-medium": _gpt2(hidden_size=1024, num_layers=24, num_heads=16),
    "gpt2-large": _gpt2(hidden_size=1280, num_layers=36, num_heads=20),
    "gpt2-xl": _gpt2(hidden_size=1600, num_layers=48, num_heads=25),
    "llama-2-7b": _llama2(hidden_size=4096, num_layers=32, num_heads=32, ffn_size=11008),
    "llama-2-13b": _llama2(hidden_size=5120, num_layers=40, num_heads=40, ffn_size=13824),
    "llama-2-70b": _llama2(
        hidden_size=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_size=28672
    ),
    "llama-3-8b": _LLAMA3_8B,
    "llama-3-70b": _llama3(hidden_size=8192, num_layers=80, num_heads=64, ffn_size=28672),
    # The 8B layer shape, cut to what one GPU trains with its optimizer: for benchmarks.
    "llama3-8b-8layers": replace(_LLAMA3_8B, num_layers=8),
    "mixtral-8x7b": replace(
        _mixtral(hidden_size=4096, num_layers=32, num_heads=32, max_positions=32768),
        moe=MoEConfig(num_experts=8, top_k=2, expert_ffn_size=14336),
    ),
    "mixtral-8x22b": replace(
        _mixtral(hidden_size=6144, num_layers=56, num_heads=48, max_positions=65536),
        moe=MoEConfig(num_experts=8, top_k=2, expert_ffn_size=16384),
    ),
    "smollm2-135m": _smollm2(
        hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, ffn_size=1536
    ),
    "smollm2-360m": _smollm2(
        hidden_size=960, num_layers=32, num_heads=15, num_kv_heads=5, ffn_size=2560
    ),
    "tinyllama-1.1b": _llama2(
        hidden_size=2048,
        num_layers=22,
        num_heads=32,
        num_kv_heads=4,
        ffn_size=5632,
        max_positions=2048,
    ),
    **ATTENTION_PRESETS,
    **LATENT_PRESETS,
    **RECURRENT_PRESETS,
    **ENCODER_PRESETS,
}
