"""Transformer language models that know their layout: importable alone, trainable over any mesh."""

from mcore_models.accounting import (
    ParameterCount,
    count_parameters,
    flops_of_documents,
    flops_per_token,
    flops_utilization,
    model_shape,
)
from mcore_models.bert import Bert
from mcore_models.build import build_model, check_layout
from mcore_models.changes import Replacement, freeze
from mcore_models.common import (
    AuxiliaryLosses,
    BuildContext,
    Builder,
    GlobalCounts,
    KVCache,
    TokenBatch,
    TokenContext,
    import_builders,
)
from mcore_models.config import ModelConfig
from mcore_models.gpt import GPT
from mcore_models.parts import (
    AttentionConfig,
    BertConfig,
    DeltaNetConfig,
    LatentAttentionConfig,
    MambaConfig,
    MoEConfig,
    MTPConfig,
    RopeConfig,
    T5Config,
)
from mcore_models.presets import gpt2, llama, preset, preset_names
from mcore_models.t5 import T5

__all__ = [
    "GPT",
    "T5",
    "AttentionConfig",
    "AuxiliaryLosses",
    "Bert",
    "BertConfig",
    "BuildContext",
    "Builder",
    "DeltaNetConfig",
    "GlobalCounts",
    "KVCache",
    "LatentAttentionConfig",
    "MTPConfig",
    "MambaConfig",
    "MoEConfig",
    "ModelConfig",
    "ParameterCount",
    "Replacement",
    "RopeConfig",
    "T5Config",
    "TokenBatch",
    "TokenContext",
    "build_model",
    "check_layout",
    "count_parameters",
    "flops_of_documents",
    "flops_per_token",
    "flops_utilization",
    "freeze",
    "gpt2",
    "import_builders",
    "llama",
    "model_shape",
    "preset",
    "preset_names",
]
