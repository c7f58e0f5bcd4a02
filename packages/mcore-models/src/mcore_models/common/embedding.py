"""Learned position embeddings. T tokens, H hidden."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_models.common.builder import BuildContext
from mcore_models.config import ModelConfig
from mcore_parallel import Init


class PositionEmbedding(nn.Module):
    """One learned vector per position (Radford et al., 2019), whole on every rank."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        size = (config.max_positions, config.hidden_size)
        self.param_init = {"weight": Init(kind="normal", std=config.init_std)}
        self.weight = nn.Parameter(torch.empty(size, dtype=build.dtype, device=build.device))

    def forward(self, positions: Tensor) -> Tensor:
        """Positions [T] to vectors [T, H]."""
        return F.embedding(positions, self.weight)
