"""Shapes of published models by name.

Sources: Grattafiori et al. 2024 (arXiv:2407.21783), DeepSeek-AI 2024 (arXiv:2412.19437), Jiang et
al. 2024 (arXiv:2401.04088), Adler et al. 2024 (Nemotron-4 340B, arXiv:2406.11704), Korthikanti et
al. 2022 (arXiv:2205.05198), and the configurations released with the open ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from mcore_parallel.cost.architecture import LayerShape, ModelShape
from mcore_parallel.cost.parts import AttentionShape, ExpertsShape, MLPShape


def llama_shape(
    *, vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, width: int
) -> ModelShape:
    """Return the shape of a decoder with RMSNorm, SwiGLU and grouped queries, without biases."""
    attention = AttentionShape(num_heads=heads, kv_heads=kv_heads, head_size=hidden // heads)
    layer = LayerShape(parts=(attention, MLPShape(width=width)), vectors=2 * hidden)
    return ModelShape(
        hidden_size=hidden, vocab_size=vocab, layers=(layer,) * layers, vectors=hidden
    )


def gpt_shape(
    *, hidden: int, layers: int, heads: int, vocab: int = 51200, positions: int = 2048
) -> ModelShape:
    """Return the shape of a GPT-3 style decoder: LayerNorm, GELU, biases, tied embeddings."""
    attention = AttentionShape(
        num_heads=heads, kv_heads=heads, head_size=hidden // heads, vectors=4 * hidden
    )
    mlp = MLPShape(width=4 * hidden, gated=False, vectors=5 * hidden)
    layer = LayerShape(parts=(attention, mlp), vectors=4 * hidden)
    return ModelShape(
        hidden_size=hidden,
        vocab_size=vocab,
        layers=(layer,) * layers,
        tied_embeddings=True,
        positions=positions,
        vectors=2 * hidden,
    )


def mixtral_shape(*, hidden: int, layers: int, heads: int, width: int) -> ModelShape:
    """Return the shape of a Mixtral: eight experts in every layer, two of them for a token."""
    attention = AttentionShape(num_heads=heads, kv_heads=8, head_size=128)
    experts = ExpertsShape(num_experts=8, top_k=2, expert=MLPShape(width=width))
    layer = LayerShape(parts=(attention, experts), vectors=2 * hidden)
    return ModelShape(
        hidden_size=hidden, vocab_size=32000, layers=(layer,) * layers, vectors=hidden
    )


def deepseek_v3_shape(*, predictions: int = 0) -> ModelShape:
    """Return DeepSeek-V3: latent attention, 3 dense layers, 58 with 256 experts and a shared."""
    hidden = 7168
    attention = AttentionShape(
        num_heads=128,
        kv_heads=128,
        head_size=192,
        value_size=128,
        q_rank=1536,
        kv_rank=512,
        rope_size=64,
        vectors=1536 + 512,
    )
    experts = ExpertsShape(
        num_experts=256,
        top_k=8,
        expert=MLPShape(width=2048),
        shared=MLPShape(width=2048),
        max_nodes=4,
        vectors=256,
    )
    dense = LayerShape(parts=(attention, MLPShape(width=18432)), vectors=2 * hidden)
    sparse = LayerShape(parts=(attention, experts), vectors=2 * hidden)
    return ModelShape(
        hidden_size=hidden,
        vocab_size=129280,
        layers=(dense,) * 3 + (sparse,) * 58,
        vectors=hidden,
        predictions=predictions,
    )


def nemotron_4_shape() -> ModelShape:
    """Return Nemotron-4 340B: squared ReLU, LayerNorm, no biases, untied embeddings."""
    hidden = 18432
    attention = AttentionShape(num_heads=96, kv_heads=8, head_size=192)
    mlp = MLPShape(width=4 * hidden, gated=False)
    layer = LayerShape(parts=(attention, mlp), vectors=4 * hidden)
    return ModelShape(
        hidden_size=hidden, vocab_size=256000, layers=(layer,) * 96, vectors=2 * hidden
    )


def _llama3(layers: int, hidden: int, heads: int, width: int) -> ModelShape:
    return llama_shape(
        vocab=128256, hidden=hidden, layers=layers, heads=heads, kv_heads=8, width=width
    )


SHAPES: Mapping[str, Callable[[], ModelShape]] = MappingProxyType(
    {
        "llama-3-8b": lambda: _llama3(32, 4096, 32, 14336),
        "llama-3-70b": lambda: _llama3(80, 8192, 64, 28672),
        "llama-3-405b": lambda: _llama3(126, 16384, 128, 53248),
        "llama3-8b-8layers": lambda: _llama3(8, 4096, 32, 14336),
        "mixtral-8x7b": lambda: mixtral_shape(hidden=4096, layers=32, heads=32, width=14336),
        "mixtral-8x22b": lambda: mixtral_shape(hidden=6144, layers=56, heads=48, width=16384),
        "deepseek-v3": deepseek_v3_shape,
        "nemotron-4-340b": nemotron_4_shape,
        "gpt-22b": lambda: gpt_shape(hidden=6144, layers=48, heads=64),
        "gpt-175b": lambda: gpt_shape(hidden=12288, layers=96, heads=96),
        "gpt-530b": lambda: gpt_shape(hidden=20480, layers=105, heads=128),
        "gpt-1t": lambda: gpt_shape(hidden=25600, layers=128, heads=160),
    }
)
"""Makers of shapes by name."""


def shape(name: str) -> ModelShape:
    """Return the shape of a name in `SHAPES`; ValueError suggests the nearest."""
    if name not in SHAPES:
        near = difflib.get_close_matches(name.lower(), SHAPES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"model {name!r}: {hint}known are {', '.join(SHAPES)}")
    return SHAPES[name]()
