"""Published decoders with attention, for `preset`, in the words of their own configurations.

Sources: `config.json` of the releases of Meta (Llama 3.1, 3.2 and 3.3), the Qwen Team (Qwen1.5 to
3), Mistral AI, Google (Gemma, Gemma 2 and 3), Ai2 (OLMo 2), EleutherAI (GPT-NeoX, Pythia),
Microsoft (Phi-3, Phi-4), Hugging Face (SmolLM), BigCode (StarCoder2), OpenAI (gpt-oss) and Z.ai
(GLM-4.5). Of Gemma 3 from 4B on it is the text model. The
layer of GLM-4.5 that predicts further tokens is left out.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf import (
    GEMMA,
    GEMMA2,
    GEMMA3,
    GLM4_MOE,
    GPT_NEOX,
    GPT_OSS,
    LLAMA,
    MISTRAL,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    SMOLLM3,
    STARCODER2,
    Architecture,
)

Shape = tuple[int, int, int, int, int]
Fields = dict[str, Any]

_SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)
_TIED: Fields = {"tie_word_embeddings": True}
_LONG: Fields = {"max_position_embeddings": 131072}
_LLAMA3: Fields = {
    **_LONG,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_LLAMA32: Fields = {**_LLAMA3, **_TIED, "rope_scaling": {**_LLAMA3["rope_scaling"], "factor": 32.0}}
_QWEN25: Fields = {"vocab_size": 151936, "rope_theta": 1e6}
_QWEN25_LARGE: Fields = {**_LONG, "vocab_size": 152064, "rms_norm_eps": 1e-5}
_QWEN3: Fields = {"vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6}
_QWEN3_EXPERTS: Fields = {**_QWEN3, "head_dim": 128, "norm_topk_prob": True}
_MISTRAL: Fields = {
    "vocab_size": 131072,
    "head_dim": 128,
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
}
_GEMMA3: Fields = {
    **_LONG,
    "vocab_size": 262208,
    "sliding_window": 1024,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
_GEMMA3_SMALL: Fields = {
    "vocab_size": 262144,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
}
_OLMO2: Fields = {
    "vocab_size": 100352,
    "max_position_embeddings": 4096,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-6,
}
_STARCODER2: Fields = {
    "vocab_size": 49152,
    "max_position_embeddings": 16384,
    "sliding_window": 4096,
}
_GPT_OSS: Fields = {"vocab_size": 201088}
_GLM45: Fields = {
    "vocab_size": 151552,
    "head_dim": 128,
    "attention_bias": True,
    "rope_theta": 1e6,
}

_FAMILIES: tuple[tuple[Architecture, dict[str, tuple[Shape, Fields]]], ...] = (
    (
        LLAMA,
        {
            "llama-3.1-8b": ((4096, 32, 32, 8, 14336), _LLAMA3),
            "llama-3.1-70b": ((8192, 80, 64, 8, 28672), _LLAMA3),
            "llama-3.1-405b": ((16384, 126, 128, 8, 53248), _LLAMA3),
            "llama-3.2-1b": ((2048, 16, 32, 8, 8192), _LLAMA32),
            "llama-3.2-3b": ((3072, 28, 24, 8, 8192), _LLAMA32),
            "llama-3.3-70b": ((8192, 80, 64, 8, 28672), _LLAMA3),
            "smollm2-1.7b": (
                (2048, 24, 32, 32, 8192),
                {
                    **_TIED,
                    "vocab_size": 49152,
                    "max_position_embeddings": 8192,
                    "rms_norm_eps": 1e-5,
                    "rope_theta": 130000,
                },
            ),
        },
    ),
    (
        QWEN2,
        {
            "qwen2.5-0.5b": ((896, 24, 14, 2, 4864), {**_QWEN25, **_TIED}),
            "qwen2.5-1.5b": ((1536, 28, 12, 2, 8960), {**_QWEN25, **_TIED, **_LONG}),
            "qwen2.5-3b": ((2048, 36, 16, 2, 11008), {**_QWEN25, **_TIED}),
            "qwen2.5-7b": (
                (3584, 28, 28, 4, 18944),
                {**_QWEN25, **_LONG, "vocab_size": 152064},
            ),
            "qwen2.5-14b": ((5120, 48, 40, 8, 13824), {**_QWEN25, **_QWEN25_LARGE}),
            "qwen2.5-32b": ((5120, 64, 40, 8, 27648), {**_QWEN25, **_QWEN25_LARGE}),
            "qwen2.5-72b": ((8192, 80, 64, 8, 29568), {**_QWEN25, **_QWEN25_LARGE}),
        },
    ),
    (
        QWEN3,
        {
            "qwen3-0.6b": ((1024, 28, 16, 8, 3072), {**_QWEN3, **_TIED}),
            "qwen3-1.7b": ((2048, 28, 16, 8, 6144), {**_QWEN3, **_TIED}),
            "qwen3-4b": ((2560, 36, 32, 8, 9728), {**_QWEN3, **_TIED}),
            "qwen3-8b": ((4096, 36, 32, 8, 12288), _QWEN3),
            "qwen3-14b": ((5120, 40, 40, 8, 17408), _QWEN3),
            "qwen3-32b": ((5120, 64, 64, 8, 25600), _QWEN3),
        },
    ),
    (
        QWEN2_MOE,
        {
            "qwen1.5-moe-a2.7b": (
                (2048, 24, 16, 16, 5632),
                {"vocab_size": 151936, "max_position_embeddings": 8192, "rope_theta": 1e6},
            ),
        },
    ),
    (
        QWEN3_MOE,
        {
            "qwen3-30b-a3b": (
                (2048, 48, 32, 4, 6144),
                {**_QWEN3_EXPERTS, "moe_intermediate_size": 768},
            ),
            "qwen3-235b-a22b": (
                (4096, 94, 64, 4, 12288),
                {**_QWEN3_EXPERTS, "moe_intermediate_size": 1536},
            ),
        },
    ),
    (
        MISTRAL,
        {
            "mistral-7b-v0.1": (
                (4096, 32, 32, 8, 14336),
                {
                    "vocab_size": 32000,
                    "max_position_embeddings": 32768,
                    "rms_norm_eps": 1e-5,
                    "sliding_window": 4096,
                },
            ),
            "mistral-7b-v0.3": (
                (4096, 32, 32, 8, 14336),
                {
                    **_MISTRAL,
                    "vocab_size": 32768,
                    "max_position_embeddings": 32768,
                    "rope_theta": 1e6,
                },
            ),
            "mistral-nemo-12b": (
                (5120, 40, 32, 8, 14336),
                {**_MISTRAL, **_LONG, "rope_theta": 1e6},
            ),
            "mistral-small-24b": (
                (5120, 40, 32, 8, 32768),
                {**_MISTRAL, "max_position_embeddings": 32768, "rope_theta": 1e8},
            ),
        },
    ),
    (
        GEMMA,
        {
            "gemma-2b": ((2048, 18, 8, 1, 16384), {"vocab_size": 256000}),
            "gemma-7b": ((3072, 28, 16, 16, 24576), {"vocab_size": 256000}),
        },
    ),
    (
        GEMMA2,
        {
            "gemma-2-2b": ((2304, 26, 8, 4, 9216), {"vocab_size": 256000}),
            "gemma-2-9b": ((3584, 42, 16, 8, 14336), {"vocab_size": 256000}),
            "gemma-2-27b": (
                (4608, 46, 32, 16, 36864),
                {"vocab_size": 256000, "head_dim": 128, "query_pre_attn_scalar": 144},
            ),
        },
    ),
    (
        GEMMA3,
        {
            "gemma-3-270m": ((640, 18, 4, 1, 2048), _GEMMA3_SMALL),
            "gemma-3-1b": ((1152, 26, 4, 1, 6912), _GEMMA3_SMALL),
            "gemma-3-4b": ((2560, 34, 8, 4, 10240), _GEMMA3),
            "gemma-3-12b": ((3840, 48, 16, 8, 15360), _GEMMA3),
            "gemma-3-27b": (
                (5376, 62, 32, 16, 21504),
                {**_GEMMA3, "head_dim": 128, "query_pre_attn_scalar": 168},
            ),
        },
    ),
    (
        OLMO2,
        {
            "olmo-2-1b": ((2048, 16, 16, 16, 8192), _OLMO2),
            "olmo-2-7b": ((4096, 32, 32, 32, 11008), _OLMO2),
            "olmo-2-13b": ((5120, 40, 40, 40, 13824), _OLMO2),
            "olmo-2-32b": ((5120, 64, 40, 8, 27648), _OLMO2),
        },
    ),
    (
        SMOLLM3,
        {
            "smollm3-3b": (
                (2048, 36, 16, 4, 11008),
                {"vocab_size": 128256, "max_position_embeddings": 65536, "rope_theta": 5e6},
            ),
        },
    ),
    (
        STARCODER2,
        {
            "starcoder2-3b": (
                (3072, 30, 24, 2, 12288),
                {**_STARCODER2, "rope_theta": 999999.4420358813},
            ),
            "starcoder2-7b": ((4608, 32, 36, 4, 18432), {**_STARCODER2, "rope_theta": 1e6}),
            "starcoder2-15b": (
                (6144, 40, 48, 4, 24576),
                {**_STARCODER2, "rope_theta": 1e5, "tie_word_embeddings": False},
            ),
        },
    ),
    (
        PHI3,
        {
            "phi-3-mini-4k": (
                (3072, 32, 32, 32, 8192),
                {"vocab_size": 32064, "sliding_window": 2047},
            ),
            "phi-3-medium-4k": (
                (5120, 40, 40, 10, 17920),
                {"vocab_size": 32064, "sliding_window": 2047},
            ),
            "phi-4": (
                (5120, 40, 40, 10, 17920),
                {"vocab_size": 100352, "max_position_embeddings": 16384, "rope_theta": 250000},
            ),
        },
    ),
    (
        GPT_NEOX,
        {
            "pythia-70m": ((512, 6, 8, 8, 2048), {"vocab_size": 50304}),
            "pythia-160m": ((768, 12, 12, 12, 3072), {"vocab_size": 50304}),
            "pythia-410m": ((1024, 24, 16, 16, 4096), {"vocab_size": 50304}),
            "pythia-1b": ((2048, 16, 8, 8, 8192), {"vocab_size": 50304}),
            "pythia-1.4b": ((2048, 24, 16, 16, 8192), {"vocab_size": 50304}),
            "pythia-2.8b": ((2560, 32, 32, 32, 10240), {"vocab_size": 50304}),
            "pythia-6.9b": ((4096, 32, 32, 32, 16384), {"vocab_size": 50432}),
            "pythia-12b": ((5120, 36, 40, 40, 20480), {"vocab_size": 50688}),
            "gpt-neox-20b": (
                (6144, 44, 64, 64, 24576),
                {"vocab_size": 50432, "hidden_act": "gelu_fast"},
            ),
        },
    ),
    (
        GPT_OSS,
        {
            "gpt-oss-20b": ((2880, 24, 64, 8, 2880), {**_GPT_OSS, "num_local_experts": 32}),
            "gpt-oss-120b": ((2880, 36, 64, 8, 2880), {**_GPT_OSS, "num_local_experts": 128}),
        },
    ),
    (
        GLM4_MOE,
        {
            "glm-4.5-air": ((4096, 46, 96, 8, 10944), _GLM45),
            "glm-4.5": (
                (5120, 92, 96, 8, 12288),
                {
                    **_GLM45,
                    "moe_intermediate_size": 1536,
                    "n_routed_experts": 160,
                    "first_k_dense_replace": 3,
                    "routed_scaling_factor": 2.5,
                    "use_qk_norm": True,
                },
            ),
        },
    ),
)


def published_configs() -> Iterator[tuple[str, Architecture, Fields]]:
    """Yield name, architecture and what `config.json` says of the models of this page."""
    for architecture, models in _FAMILIES:
        for name, (shape, fields) in models.items():
            yield name, architecture, {**dict(zip(_SHAPE, shape, strict=True)), **fields}


ATTENTION_PRESETS: Mapping[str, ModelConfig] = {
    name: architecture.read_config(config) for name, architecture, config in published_configs()
}
