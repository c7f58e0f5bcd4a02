"""Learned embeddings of positions and of segments. T tokens, H hidden."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_models.common.builder import BuildContext
from mcore_models.config import ModelConfig
from mcore_parallel import Init


class _Table(nn.Module):
    """Learned vectors, whole on every rank. `what` one row is of, and `field` counts them."""

    def __init__(
        self, rows: int, what: str, field: str, config: ModelConfig, build: BuildContext
    ) -> None:
        super().__init__()
        self._what, self._field = what, field
        size = (rows, config.hidden_size)
        self.param_init = {"weight": Init(kind="normal", std=config.init_std)}
        self.weight = nn.Parameter(torch.empty(size, dtype=build.dtype, device=build.device))

    def forward(self, rows: Tensor) -> Tensor:
        """Numbers of rows [T] to vectors [T, H].

        Raises:
            ValueError: there is no such row. Looked at on the CPU only, since elsewhere it would
                cost a synchronisation; the device has an error of its own.
        """
        if rows.device.type == "cpu" and rows.numel():
            low, high = (int(x) for x in rows.aminmax())
            if low < 0 or high >= len(self.weight):
                raise ValueError(
                    f"{self._what} {low if low < 0 else high} is not in the table of "
                    f"{self._field}={len(self.weight)}: use 0 to {len(self.weight) - 1}"
                )
        return F.embedding(rows, self.weight)


class PositionEmbedding(_Table):
    """One learned vector per position (Radford et al., 2019), whole on every rank."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config.max_positions, "position", "max_positions", config, build)


class TokenTypeEmbedding(_Table):
    """One learned vector per segment (Devlin et al., 2019), whole on every rank."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        assert config.bert is not None
        rows, field = config.bert.num_token_types, "bert.num_token_types"
        super().__init__(rows, "token type", field, config, build)
