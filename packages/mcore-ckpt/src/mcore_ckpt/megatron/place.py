"""Which parts of a model each rank of a run of Megatron-LM held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.megatron.family import Cut
from mcore_parallel.layout import TensorLayout


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The parallel degrees of a run, from its stored arguments.

    tp, pp, ep, etp: degrees. virtual: chunks of each pipeline stage. layers: how many in all.
    experts: how many in all, 0 without. first, last: layers of the first and last stage where they
    were given.
    """

    tp: int
    pp: int
    ep: int
    etp: int
    virtual: int
    layers: int
    experts: int
    first: int | None = None
    last: int | None = None

    @staticmethod
    def of(args: Mapping[str, Any]) -> Degrees:
        """Return the degrees that stored arguments say.

        Raises:
            ValueError: layers were laid out over stages in a way that is not supported.
        """
        for name in (
            "pipeline_model_parallel_layout",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ):
            if args.get(name):
                raise ValueError(
                    f"{name}={args[name]!r}: optimizer state of such a pipeline is read from "
                    f"fully_reshardable checkpoints alone"
                )
        tp = int(args.get("tensor_model_parallel_size") or 1)
        return Degrees(
            tp=tp,
            pp=int(args.get("pipeline_model_parallel_size") or 1),
            ep=int(args.get("expert_model_parallel_size") or 1),
            etp=int(args.get("expert_tensor_parallel_size") or tp),
            virtual=int(args.get("virtual_pipeline_model_parallel_size") or 1),
            layers=int(args["num_layers"]),
            experts=int(args.get("num_experts") or 0),
            first=args.get("decoder_first_pipeline_num_layers"),
            last=args.get("decoder_last_pipeline_num_layers"),
        )

    def layers_of(self, stage: int, chunk: int = 0) -> range:
        """Return the layers of a chunk of a pipeline stage.

        Raises:
            ValueError: the layers cannot be dealt out evenly.
        """
        given = (self.first is not None) + (self.last is not None)
        rest = self.layers - (self.first or 0) - (self.last or 0)
        middle = self.pp - given
        if (middle and rest % (middle * self.virtual)) or (not middle and rest):
            raise ValueError(
                f"{self.layers} layers cannot be dealt out over pp={self.pp} with "
                f"{self.virtual} chunks each"
            )
        sizes = [rest // middle if middle else 0] * self.pp
        for place, size in ((0, self.first), (-1, self.last)):
            if size is not None:
                sizes[place] = size
        each = [size // self.virtual for size in sizes]
        start = chunk * sum(each) + sum(each[:stage])
        return range(start, start + each[stage])

    def experts_of(self, rank: int) -> range:
        """Return the experts of a rank of the expert-parallel group."""
        count = self.experts // self.ep
        return range(rank * count, (rank + 1) * count)


def joined(parts: Sequence[TensorLayout], cut: Cut) -> TensorLayout:
    """Return the layout of a tensor of which tensor-parallel ranks hold these parts, in order."""
    if len(parts) == 1 or cut == "whole":
        return parts[0]
    if cut == "rows":
        return TensorLayout.concat(parts)
    if cut == "columns":
        return TensorLayout.concat(parts, 1)
    halves: list[TensorLayout] = []
    for half in range(2):
        for part in parts:
            size = part.shape[0] // 2
            halves.append(part.slice(0, half * size, (half + 1) * size))
    return TensorLayout.concat(halves)


def local_shape(shape: Sequence[int], cut: Cut, tp: int) -> tuple[int, ...]:
    """Return the shape of the part that each of `tp` ranks holds of a tensor."""
    if cut == "whole" or tp == 1:
        return tuple(shape)
    dim = 1 if cut == "columns" else 0
    return tuple(n // tp if i == dim else n for i, n in enumerate(shape))


def is_expert(name: str) -> bool:
    """Return whether a tensor is an expert's own: such are cut over ranks of their own."""
    return ".experts.experts." in name


def numbered(parts: Mapping[int, TensorLayout], name: str) -> Iterator[TensorLayout]:
    """Yield parts by number; ValueError when one is missing."""
    for number in range(len(parts)):
        if number not in parts:
            raise ValueError(f"{name}: the part of tensor-parallel rank {number} is missing")
        yield parts[number]
