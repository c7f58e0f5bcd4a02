"""Small linear layers with a bias that every tensor-parallel rank holds whole."""

import torch
from torch import Tensor, nn

from mcore_models.common.builder import BuildContext
from mcore_models.config import ModelConfig
from mcore_parallel import Init


class Dense(nn.Module):
    """y = x Aᵀ + b of the rows that a rank has: [n, H] to [n, O].

    all_tokens: every tensor-parallel rank has all rows, also under sequence parallelism; its
    gradients are then whole, not shares of a sum over the group.
    """

    def __init__(
        self, config: ModelConfig, build: BuildContext, features: int, *, all_tokens: bool = False
    ) -> None:
        super().__init__()
        self.grad_is_partial = not all_tokens
        self.param_init = {"weight": Init(kind="normal", std=config.init_std)}
        size = (features, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(size, dtype=build.dtype, device=build.device))
        self.bias = nn.Parameter(torch.empty(features, dtype=build.dtype, device=build.device))
        self._linear = build.kernels.linear

    def forward(self, rows: Tensor) -> Tensor:
        """Project every row."""
        out: Tensor = self._linear(rows, self.weight, self.bias)
        return out
