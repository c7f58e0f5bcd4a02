"""Published models with recurrent mixers, for `preset`.

Sources: the configurations of the releases of Mamba-2 (state-spaces), Mamba-Codestral and
Qwen3-Next-80B-A3B; NVIDIA, "Nemotron-H" (2025), and the configuration of its 8B base.
"""

from collections.abc import Mapping

from mcore_models.config import ModelConfig
from mcore_models.parts import AttentionConfig, DeltaNetConfig, MambaConfig, MoEConfig, RopeConfig

_STATE_SPACES = {
    "130m": (768, 24),
    "370m": (1024, 48),
    "780m": (1536, 36),
    "1.3b": (2048, 48),
    "2.7b": (2560, 64),
}


def _mamba2(hidden: int, layers: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=50288,
        hidden_size=hidden,
        num_layers=layers,
        position="none",
        tied_embeddings=True,
        mamba=MambaConfig(num_heads=2 * hidden // 64, head_dim=64, state_size=128, num_groups=1),
    )


RECURRENT_PRESETS: Mapping[str, ModelConfig] = {
    **{f"mamba2-{size}": _mamba2(*shape) for size, shape in _STATE_SPACES.items()},
    "mamba-codestral-7b": ModelConfig(
        vocab_size=32768,
        hidden_size=4096,
        num_layers=64,
        position="none",
        mamba=MambaConfig(num_heads=128, head_dim=64, state_size=128, num_groups=8),
    ),
    "nemotron-h-8b": ModelConfig(
        vocab_size=131072,
        hidden_size=4096,
        num_layers=52,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=21504,
        max_positions=8192,
        activation="squared_relu",
        position="none",
        # One letter of the published pattern is one layer.
        pattern="M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-",  # type: ignore[arg-type]
        mamba=MambaConfig(
            num_heads=128, head_dim=64, state_size=128, num_groups=8, dt_min=0.001, chunk_size=128
        ),
    ),
    "qwen3-next-80b-a3b": ModelConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_layers=48,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        ffn_size=5120,
        max_positions=262144,
        norm_eps=1e-6,
        zero_centered_norm=True,
        rope_base=1e7,
        pattern=12 * ("GE", "GE", "GE", "*E"),
        attention=AttentionConfig(qk_norm="head", gate=True),
        rope=RopeConfig(rotary_dim=64),
        moe=MoEConfig(
            num_experts=512, top_k=10, expert_ffn_size=512, shared_ffn_size=512, shared_gate=True
        ),
        delta_net=DeltaNetConfig(num_key_heads=16, num_value_heads=32),
    ),
}
"""By name; the embeddings of Mamba-2 are padded to a multiple of 16 as they were published."""
