"""Norms over the hidden dimension. T tokens, H hidden."""

import torch
from torch import Tensor, nn

from mcore_models.common.builder import BuildContext, build_seeded
from mcore_models.config import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich, 2019); [..., H] to [..., H]."""

    def __init__(self, size: int, *, eps: float, build: BuildContext) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=build.dtype, device=build.device))
        self._rms_norm = build.kernels.rms_norm

    def forward(self, hidden: Tensor) -> Tensor:
        """Norm every row."""
        out: Tensor = self._rms_norm(hidden, self.weight, self.eps)
        return out


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) · weight + bias (Ba et al., 2016); [..., H] to [..., H]."""

    def __init__(self, size: int, *, eps: float, build: BuildContext) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=build.dtype, device=build.device))
        self.bias = nn.Parameter(torch.empty(size, dtype=build.dtype, device=build.device))
        self._layer_norm = build.kernels.layer_norm

    def forward(self, hidden: Tensor) -> Tensor:
        """Norm every row."""
        out: Tensor = self._layer_norm(hidden, self.weight, self.bias, self.eps)
        return out


def build_norm(config: ModelConfig, build: BuildContext, layer_index: int) -> nn.Module:
    """The norm that `config` names, or what the builder called "norm" makes."""
    if "norm" in build.builders:
        return build_seeded(build.builders["norm"], config, build, layer_index, "norm")
    kind = RMSNorm if config.norm == "rms_norm" else LayerNorm
    return kind(config.hidden_size, eps=config.norm_eps, build=build)
