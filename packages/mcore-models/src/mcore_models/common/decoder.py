"""The stack of layers of one pipeline stage."""

from collections.abc import Iterable

from torch import Tensor, nn

from mcore_models.common.batch import TokenContext
from mcore_models.common.block import Block
from mcore_models.common.builder import BuildContext
from mcore_models.config import ModelConfig


class Decoder(nn.ModuleDict):
    """Layers keyed by their global index, so that module names are the model's global names."""

    def __init__(self, config: ModelConfig, build: BuildContext, layers: Iterable[int]) -> None:
        super().__init__({str(index): Block(config, build, index) for index in layers})

    def forward(
        self, hidden: Tensor, context: TokenContext, layers: Iterable[int] | None = None
    ) -> Tensor:
        """Run the layers in order (all, or those given): hidden states [T, H] to [T, H]."""
        for name in self if layers is None else map(str, layers):
            hidden = self[name](hidden, context)
        return hidden
