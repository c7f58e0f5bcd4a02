"""Multi-token prediction (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, 2.2).

T tokens, t of them with hidden states here (T / tp under sequence parallelism), H hidden.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from mcore_models.common.builder import BuildContext
from mcore_models.common.context import TokenContext
from mcore_models.common.decoder import Decoder
from mcore_models.common.norm import build_norm
from mcore_models.common.whole_linear import WholeLinear
from mcore_models.config import ModelConfig


class PredictionDepth(nn.Module):
    """One further token: hidden states [t, H] of the depth before to those for its own head.

    depth: counted from 0. Its layer counts as layer `num_layers + depth` of the model wherever
    layers are told apart by number.
    """

    def __init__(self, config: ModelConfig, build: BuildContext, depth: int) -> None:
        super().__init__()
        index = config.num_layers + depth
        self.hidden_norm = build_norm(config, build, index)
        self.embedding_norm = build_norm(config, build, index)
        size = config.hidden_size
        self.project = WholeLinear(2 * size, size, build=build, std=config.init_std)
        pattern = (*config.layer_pattern, *config.mtp_pattern)
        longer = replace(config, num_layers=len(pattern), pattern=pattern, mtp=None)
        self.layers = Decoder(longer, build, [index], first=index)
        self.final_norm = build_norm(config, build, index)

    def forward(self, hidden: Tensor, embedded: Tensor, context: TokenContext) -> Tensor:
        """`hidden` [t, H] and the embeddings [t, H] of the tokens `depth + 1` places on.

        `context` has the batch of this depth, see `TokenBatch.at_depth`.
        """
        joined = torch.cat([self.hidden_norm(hidden), self.embedding_norm(embedded)], -1)
        out: Tensor = self.final_norm(self.layers(self.project(joined), context))
        return out


def loss_names(config: ModelConfig) -> tuple[str, ...]:
    """The name of each depth's loss, as it is reported."""
    return tuple(f"mtp_loss_{depth}" for depth in range(len(config.mtp_pattern)))
