"""The stack of layers of one pipeline stage."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from mcore_models.common.block import Block
from mcore_models.common.builder import BuildContext
from mcore_models.common.context import TokenContext
from mcore_models.common.lanes import split_lanes
from mcore_models.common.residual import Residual
from mcore_models.config import ModelConfig
from mcore_parallel.expert import Steps, in_turns
from mcore_parallel.recompute import recompute


class Decoder(nn.ModuleDict):
    """Layers keyed by their global index, so that module names are the model's global names.

    Layers that are recomputed as a whole (`RecomputeConfig`) run under `recompute`, and all-gather
    their inputs over the tensor-parallel group where these are spread over it. With several lanes
    (`ParallelConfig`) parts of the micro-batch take turns where they would wait for messages.

    first: the global index of the layer that is called 0.
    """

    def __init__(
        self, config: ModelConfig, build: BuildContext, layers: Iterable[int], *, first: int = 0
    ) -> None:
        super().__init__({str(index - first): Block(config, build, index) for index in layers})
        self._recompute = build.recompute
        self._spread = build.tp if build.recompute.spread else None
        self._lanes = build.mesh.config.lanes

    def forward(
        self, hidden: Tensor, context: TokenContext, layers: Iterable[int] | None = None
    ) -> Tensor:
        """Run the layers in order (all, or those given): hidden states [T, H] to [T, H]."""
        names = list(self) if layers is None else list(map(str, layers))
        if context.cache is not None:  # its entries are made once
            return self._run(names, context, hidden)
        if self._lanes > 1:
            parts = split_lanes(context, self._lanes)
            steps = [self._in_turns(names, part, hidden[rows]) for part, rows in parts]
            return torch.cat(in_turns(steps))
        for again, group in self._recompute.groups(names):
            run = partial(self._run, group, context)
            hidden = recompute(run, hidden, spread=self._spread) if again else run(hidden)
        return hidden

    def _in_turns(self, names: list[str], context: TokenContext, hidden: Tensor) -> Steps[Tensor]:
        """As `forward`; yields where a layer does. Layers that are recomputed run as one."""
        whole = replace(context, in_turns=False)
        for again, group in self._recompute.groups(names):
            if again:
                hidden = recompute(partial(self._run, group, whole), hidden, spread=self._spread)
                continue
            stream = Residual(hidden)
            for name in group:
                stream = yield from self[name](stream, context)
            hidden = stream.settled()
        return hidden

    def _run(self, names: list[str], context: TokenContext, hidden: Tensor) -> Tensor:
        stream = Residual(hidden)
        for name in names:
            stream = self[name](stream, context)
        return stream.settled()
