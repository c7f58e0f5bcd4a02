"""The parts that decoders are made of: a layer is a mixer and a feed-forward behind norms."""

from mcore_models.common.attention import Attention
from mcore_models.common.auxiliary import AuxiliaryLosses
from mcore_models.common.batch import GlobalCounts, TokenBatch
from mcore_models.common.block import Block
from mcore_models.common.builder import BuildContext, Builder, import_builders
from mcore_models.common.context import KVCache, ResidualDropout, TokenContext
from mcore_models.common.decoder import Decoder
from mcore_models.common.delta_net import DeltaNet
from mcore_models.common.embedding import PositionEmbedding
from mcore_models.common.latent_attention import LatentAttention
from mcore_models.common.mamba2 import Mamba2
from mcore_models.common.mlp import MLP
from mcore_models.common.moe import MoE, Routing
from mcore_models.common.norm import LayerNorm, RMSNorm, build_norm

__all__ = [
    "MLP",
    "Attention",
    "AuxiliaryLosses",
    "Block",
    "BuildContext",
    "Builder",
    "Decoder",
    "DeltaNet",
    "GlobalCounts",
    "KVCache",
    "LatentAttention",
    "LayerNorm",
    "Mamba2",
    "MoE",
    "PositionEmbedding",
    "RMSNorm",
    "ResidualDropout",
    "Routing",
    "TokenBatch",
    "TokenContext",
    "build_norm",
    "import_builders",
]
