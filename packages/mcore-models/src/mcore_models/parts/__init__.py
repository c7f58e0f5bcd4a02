"""The parts of a layer that have a configuration of their own, below `ModelConfig`."""

from mcore_models.parts.attention import AttentionConfig
from mcore_models.parts.bert import BertConfig
from mcore_models.parts.delta_net import DeltaNetConfig
from mcore_models.parts.latent import LatentAttentionConfig
from mcore_models.parts.mamba import MambaConfig
from mcore_models.parts.moe import TRAINING_FIELDS, BalanceScope, MoEConfig, ScoreFunction
from mcore_models.parts.mtp import MTPConfig
from mcore_models.parts.rope import RopeConfig
from mcore_models.parts.t5 import T5Config

__all__ = [
    "TRAINING_FIELDS",
    "AttentionConfig",
    "BalanceScope",
    "BertConfig",
    "DeltaNetConfig",
    "LatentAttentionConfig",
    "MTPConfig",
    "MambaConfig",
    "MoEConfig",
    "RopeConfig",
    "ScoreFunction",
    "T5Config",
]
