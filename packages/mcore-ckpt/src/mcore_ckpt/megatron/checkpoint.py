"""A checkpoint of Megatron-LM in any of its formats, as sources of tensors under our names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.hf.config import check_shapes
from mcore_ckpt.megatron.family import Family, find_family
from mcore_ckpt.megatron.finding import Format, find_checkpoint
from mcore_ckpt.megatron.keys import MASTER
from mcore_ckpt.megatron.pieces import Pieces
from mcore_ckpt.sources import Joined, MappedSource, TensorSource, metas
from mcore_parallel.mapping import Resolved


@dataclass(frozen=True, kw_only=True)
class MegatronCheckpoint:
    """An opened checkpoint.

    Attributes:
        path: its own folder.
        format: which of Megatron-LM's.
        model: the architecture as JSON values, as `state["config"]["model"]` has it.
        weights: the weights under our names: fp32 masters where there are some.
        moments: optimizer state under our names, by its kind (`exp_avg`, `exp_avg_sq`).
        iteration: training steps.
        optimizer_step: steps that the optimizer has made; None without optimizer state.
        consumed_samples: samples that training had consumed, if it is stored.
    """

    path: Path
    format: Format
    model: Mapping[str, Any]
    weights: TensorSource
    moments: Mapping[str, TensorSource]
    iteration: int
    optimizer_step: int | None
    consumed_samples: int | None

    @staticmethod
    def open(
        path: str | os.PathLike[str],
        *,
        optimizer: bool = True,
        known: Mapping[str, Family] | None = None,
    ) -> MegatronCheckpoint:
        """Open a checkpoint, or of several the one that the tracker file names.

        No tensor is read. Nothing that is in the files is run.

        optimizer: look at the optimizer's state; without it only at the weights. known: kinds of
        models by name, looked at before those that installed packages register.

        Raises:
            FileNotFoundError: there is none.
            ValueError: an argument that is stored says what is not supported; the tensors are not
                those of the model, or the optimizer's not those of its parameters; names them.
            CheckpointError: a file is damaged, or holds what is not known to be a value alone.
        """
        folder, kind = find_checkpoint(path)
        family = find_family(known=known)
        pieces = _open(folder, kind, family, optimizer)
        mapping = family.mapping(pieces.model)
        shapes = family.shapes(pieces.model)

        def ours(tensors: Resolved, wanted: Mapping[str, tuple[int, ...]] | None) -> MappedSource:
            theirs = MappedSource(pieces.source, tensors)
            try:
                source = MappedSource(theirs, mapping.forward(metas(theirs)))
                if wanted is not None:
                    check_shapes(metas(source), wanted)
            except ValueError as error:
                raise ValueError(f"{folder}: {error}") from None
            return source

        weights: TensorSource = ours(pieces.weights, shapes)
        states = {
            name: _trained(ours(resolved, None), shapes, f"{folder}: {name}")
            for name, resolved in pieces.states.items()
        }
        if MASTER in states:
            master = states.pop(MASTER)
            weights = Joined(
                {name: (weights, name) for name in weights}
                | {name: (master, name) for name in master}
            )
        return MegatronCheckpoint(
            path=folder,
            format=kind,
            model=family.to_tree(pieces.model),
            weights=weights,
            moments=states,
            iteration=pieces.iteration,
            optimizer_step=pieces.optimizer_step if states else None,
            consumed_samples=pieces.consumed_samples,
        )


def _open(folder: Path, kind: Format, family: Family, optimizer: bool) -> Pieces:
    if kind == "torch":
        from mcore_ckpt.megatron.ranks import open_ranks

        return open_ranks(folder, family, optimizer)
    from mcore_ckpt.megatron.sharded import open_fsdp, open_torch_dist

    opener = open_torch_dist if kind == "torch_dist" else open_fsdp
    return opener(folder, family, optimizer)


def _trained(
    source: TensorSource, shapes: Mapping[str, tuple[int, ...]], where: str
) -> TensorSource:
    """Check optimizer state: every tensor is as large as the weight of its name."""
    for name, meta in metas(source).items():
        if name not in shapes:
            raise ValueError(f"{where}.{name} is of no tensor of the model")
        if meta.shape != tuple(shapes[name]):
            raise ValueError(
                f"{where}.{name} has shape {list(meta.shape)}, the weight {list(shapes[name])}"
            )
    if not list(source):
        raise CheckpointError(f"{where}: there is no such state")
    return source
