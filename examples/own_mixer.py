"""Put a mixer of your own into the decoder: a builder and a pattern letter, no fork.

The mixer knows nothing about parallelism; under tensor parallelism every rank runs it whole.
"""

import torch
from torch import Tensor, nn

from mcore_models import BuildContext, ModelConfig, TokenContext, build_model, llama


class MovingAverage(nn.Module):
    """Each token sees a learned average of the last few tokens of its document."""

    def __init__(self, size: int, width: int = 4) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.full((width, size), 1 / width))

    def forward(self, hidden: Tensor, context: TokenContext) -> Tensor:
        out = torch.zeros_like(hidden)
        for back, tap in enumerate(self.taps):
            seen = (context.batch.positions >= back).unsqueeze(1)
            out = out + torch.roll(hidden, back, 0) * seen * tap
        return out


def moving_average(config: ModelConfig, context: BuildContext, layer_index: int) -> nn.Module:
    return MovingAverage(config.hidden_size)


if __name__ == "__main__":
    from dataclasses import replace

    config = llama(vocab_size=100, hidden_size=32, num_layers=4, num_heads=4)
    config = replace(config, pattern=("A-", "A-", "*-", "A-"))  # one attention layer in four
    model = build_model(config, builders={"A": moving_average})
    logits = model(torch.randint(100, (2, 16)))
    logits.square().mean().backward()
    print(tuple(logits.shape), sorted(model.specs())[:3])
