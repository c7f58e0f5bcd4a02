"""The short convolution of recurrent mixers, cut over ranks as the projections before it are.

T tokens, C channels of this rank, W taps, B documents.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from mcore_models.common.batch import TokenBatch
from mcore_models.common.builder import BuildContext
from mcore_parallel import Init, ParamSpec
from mcore_parallel.context import HeadExchange, WideRows
from mcore_parallel.spec import join
from mcore_parallel.tensor import Part, fused_spec


@dataclass(frozen=True)
class Documents:
    """The bounds of documents, as operators take them."""

    cu_seqlens: Tensor
    max_seqlen: int
    uniform: tuple[int, int] | None

    @classmethod
    def of(cls, batch: TokenBatch) -> Self:
        """Those of a batch."""
        return cls(batch.cu_seqlens, batch.max_seqlen, batch.uniform)

    def widen(self, exchange: HeadExchange, tokens: int) -> tuple[WideRows, Self]:
        """The rows of all ranks of an exchange, from this rank's `tokens`, and their documents."""
        bounds, device = self.cu_seqlens, self.cu_seqlens.device
        wide = exchange.widen((bounds, bounds), self.uniform, (tokens, tokens), device)
        longest = self.max_seqlen * exchange.group.size
        return wide, type(self)(wide.cu_seqlens, longest, wide.uniform)


class CausalConv(nn.Module):
    """silu of a causal convolution of each channel; `parts` are cut as their projections are.

    Weight [C, W] is uniform within ± 1 / sqrt(W), the bias starts at 0. Called with the heads that
    the exchange over the context-parallel group gives this rank, it takes the rows of the weight
    for these. Their names are those of the global tensors, in place of the module's own.
    """

    def __init__(
        self, parts: Mapping[str, Part], width: int, *, bias: bool, build: BuildContext
    ) -> None:
        super().__init__()
        self._parts = dict(parts)
        self._group = build.tp
        channels = sum(part.local_features(build.tp.size) for part in parts.values())
        weight = torch.empty(channels, width, dtype=build.dtype, device=build.device)
        self.weight = nn.Parameter(weight)
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(weight.new_empty(channels))
        else:
            self.register_parameter("bias", None)
        self._conv = build.kernels.causal_conv1d
        self._exchange = build.shared(HeadExchange, lambda: HeadExchange(build.mesh.cp))

    def forward(
        self, rows: Tensor, documents: Documents, before: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The convolution of rows [T, C], and the last W-1 inputs of each document.

        `before` [B, W-1, C] are the inputs before the batch's.
        """
        return self._conv(
            rows,
            self._mine(self.weight),
            None if self.bias is None else self._mine(self.bias),
            cu_seqlens=documents.cu_seqlens,
            uniform=documents.uniform,
            initial_states=before,
            silu=True,
        )

    def _mine(self, parameter: Tensor) -> Tensor:
        """The rows of the weight or bias for the channels that are here."""
        if self._exchange.group.size == 1:
            return parameter
        sizes = [part.local_features(self._group.size) for part in self._parts.values()]
        return torch.cat(
            [
                self._exchange.my_heads(piece.view(-1, part.unit_size, *piece.shape[1:])).flatten(
                    0, 1
                )
                for piece, part in zip(
                    torch.split(parameter, sizes), self._parts.values(), strict=True
                )
            ]
        )

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """The specs of `weight` and `bias`: each part's name replaces the last of `prefix`."""
        parent, width = prefix.rpartition(".")[0], self.weight.shape[1]

        def spec(kind: str, columns: tuple[int, ...], init: Init) -> ParamSpec:
            named = {join(parent, f"{name}.{kind}"): part for name, part in self._parts.items()}
            return fused_spec(named, self._group, columns, init=init)

        bound = width**-0.5
        specs = {"weight": spec("weight", (width,), Init(kind="uniform", low=-bound, high=bound))}
        if self.bias is not None:
            specs["bias"] = spec("bias", (), Init(kind="zeros"))
        return specs
