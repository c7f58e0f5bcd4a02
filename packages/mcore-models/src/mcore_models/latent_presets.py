"""Published decoders with latent attention, for `preset`, in the words of their configurations.

Sources: `config.json` of the releases of DeepSeek-AI (DeepSeek-V3) and Moonshot AI (Kimi K2), and
DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (arXiv:2412.19437), 4.2, for how it was trained:
the rate of the corrections and the weight of the balance loss. The layer of DeepSeek-V3 that
predicts further tokens is left out: `dataclasses.replace(model, mtp=MTPConfig())` has it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.deepseek import DEEPSEEK_V3

_YARN = {
    "type": "yarn",
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_DEEPSEEK_V3: dict[str, Any] = {
    "max_position_embeddings": 163840,
    "rope_theta": 10000.0,
    "rope_scaling": {**_YARN, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0},
}
_KIMI_K2: dict[str, Any] = {
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "rope_theta": 50000.0,
    "rope_scaling": {**_YARN, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
}


def published_latent_configs() -> dict[str, dict[str, Any]]:
    """By name of the preset, what its `config.json` says where transformers' class says else."""
    return {"deepseek-v3": _DEEPSEEK_V3, "kimi-k2": _KIMI_K2}


def _model(config: Mapping[str, Any]) -> ModelConfig:
    model = DEEPSEEK_V3.read_config(config)
    assert model.moe is not None
    return replace(model, moe=replace(model.moe, correction_rate=1e-3, aux_loss_coefficient=1e-4))


LATENT_PRESETS: Mapping[str, ModelConfig] = {
    name: _model(config) for name, config in published_latent_configs().items()
}
"""The models by name."""
