"""Optimizer state in flat buckets, given back to the parameters that it is of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mcore_ckpt.dcp.source import DcpFolder
from mcore_ckpt.megatron.buckets import parts_in
from mcore_ckpt.megatron.family import Family
from mcore_ckpt.megatron.keys import Bucket
from mcore_ckpt.megatron.place import Degrees, is_expert, joined, local_shape, numbered
from mcore_parallel.layout import TensorLayout
from mcore_parallel.mapping import Mapped, TensorMeta

Parts = dict[str, dict[int, TensorLayout]]
"""The parts of tensors by name and tensor-parallel rank."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What has written a checkpoint: a model, and how ranks had cut it. `where`: for messages."""

    family: Family
    model: Any
    degrees: Degrees
    where: str

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of their tensors, which follow from those of ours."""
        ours = {
            name: TensorMeta(shape, torch.float32)
            for name, shape in self.family.shapes(self.model).items()
        }
        made = self.family.mapping(self.model).inverse(ours).tensors
        shapes = {name: mapped.shape for name, mapped in made.items()}
        # A last stage that is not the first has a copy of tied embeddings.
        shapes.setdefault("output_layer.weight", shapes["embedding.word_embeddings.weight"])
        return shapes

    def local(self, names: Sequence[str], *, expert: bool) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what a tensor-parallel rank holds of some tensors."""
        shapes, tp = self.shapes, self.degrees.etp if expert else self.degrees.tp
        return {
            name: local_shape(shapes[name], self.family.cut(self.model, name), tp) for name in names
        }

    def parameters(
        self, stage: int, chunk: int, experts: Sequence[int], *, expert: bool
    ) -> list[str]:
        """Return the parameters of a chunk of a stage in order: those of experts, or the others."""
        degrees = self.degrees
        names = self.family.stage(
            self.model,
            degrees.layers_of(stage, chunk),
            experts,
            first=stage == 0 and chunk == 0,
            last=stage == degrees.pp - 1 and chunk == degrees.virtual - 1,
        )
        return [name for name in names if is_expert(name) == expert]

    def whole(self, parts: Parts, dtypes: Mapping[str, torch.dtype]) -> dict[str, Mapped]:
        """Return tensors put together from the parts of tensor-parallel ranks."""
        return {
            name: Mapped(
                joined(list(numbered(of, name)), self.family.cut(self.model, name)), dtypes[name]
            )
            for name, of in parts.items()
        }


def bucket_states(
    buckets: Mapping[str, Mapping[Bucket, str]], source: DcpFolder, run: Run
) -> dict[str, dict[str, Mapped]]:
    """Return optimizer state by its kind and the name of its parameter.

    buckets: the flat tensors by kind and place.

    Raises:
        ValueError: the buckets are not those of a model cut in this way; names the first.
    """
    degrees = run.degrees
    states = {}
    for kind, placed in buckets.items():
        parts: Parts = defaultdict(dict)
        dtypes = {}
        for held in _buffers(placed):
            first = held[0][0]
            expert = first.optimizer > 0
            tp, ep = (degrees.etp, degrees.ep) if expert else (degrees.tp, 1)
            place, rank = divmod(first.group, tp)
            stage, part = divmod(place, ep)
            experts = degrees.experts_of(part) if expert else range(0)
            names = run.parameters(stage, first.buffer, experts, expert=expert)
            stored = [(key, source.meta(key).shape[0]) for _, key in held]
            where = f"{run.where}: {stored[0][0]}"
            for name, layout in parts_in(run.local(names, expert=expert), stored, where):
                _check_edges(name, layout, source, where)
                parts[name].setdefault(rank, layout)
                dtypes[name] = source.meta(stored[0][0]).dtype
        states[kind] = run.whole(parts, dtypes)
    return states


def _check_edges(name: str, layout: TensorLayout, source: DcpFolder, where: str) -> None:
    """Check that a parameter begins and ends where something that was stored does.

    What is stored are parts of parameters: those of another order have other edges.
    """
    (key,) = layout.names()
    boxes = [f.box for f in layout.fragments]
    begin, end = min(box.start[0] for box in boxes), max(box.stop[0] for box in boxes)
    chunks = source.chunks(key)
    if begin not in {c.start[0] for c in chunks} or end not in {c.stop[0] for c in chunks}:
        raise ValueError(
            f"{where}: {name} would be elements {begin} to {end}, and nothing that is stored "
            f"begins and ends there: the buckets are not those of the stored arguments"
        )


def _buffers(placed: Mapping[Bucket, str]) -> Iterator[Sequence[tuple[Bucket, str]]]:
    """Yield the buckets of each buffer, in order."""
    grouped: dict[tuple[int, int, int], list[tuple[Bucket, str]]] = defaultdict(list)
    for bucket, key in sorted(placed.items()):
        grouped[bucket.optimizer, bucket.group, bucket.buffer].append((bucket, key))
    for held in grouped.values():
        if len({bucket.dtype for bucket, _ in held}) > 1:
            raise ValueError(f"{held[0][1]}: parameters of several dtypes are not supported here")
        yield held
