"""Learned embeddings of positions and of segments. T tokens, H hidden."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_models.common.builder import BuildContext
from mcore_models.config import ModelConfig
from mcore_parallel import Init


class _Table(nn.Module):
    """Learned vectors, whole on every rank."""

    def __init__(self, rows: int, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        size = (rows, config.hidden_size)
        self.param_init = {"weight": Init(kind="normal", std=config.init_std)}
        self.weight = nn.Parameter(torch.empty(size, dtype=build.dtype, device=build.device))

    def forward(self, rows: Tensor) -> Tensor:
        """Numbers of rows [T] to vectors [T, H]."""
        return F.embedding(rows, self.weight)


class PositionEmbedding(_Table):
    """One learned vector per position (Radford et al., 2019), whole on every rank."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config.max_positions, config, build)


class TokenTypeEmbedding(_Table):
    """One learned vector per segment (Devlin et al., 2019), whole on every rank."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        assert config.bert is not None
        super().__init__(config.bert.num_token_types, config, build)
