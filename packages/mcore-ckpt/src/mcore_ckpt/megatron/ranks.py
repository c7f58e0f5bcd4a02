"""Older checkpoints of Megatron-LM: a folder `mp_rank_TT[_PPP][_EEE]` for each model-parallel rank.

Each has `model_optim_rng.pt`, and `distrib_optim.pt` where the optimizer was distributed. Tensors
stay views of the mapped files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.megatron.buckets import bucket_lengths, parts_of
from mcore_ckpt.megatron.family import Family
from mcore_ckpt.megatron.finding import RANK_FOLDER
from mcore_ckpt.megatron.flat import Parts, Run
from mcore_ckpt.megatron.keys import MASTER
from mcore_ckpt.megatron.memory import Views
from mcore_ckpt.megatron.pieces import Common, Pieces, resolved, step_of
from mcore_ckpt.megatron.place import Degrees, is_expert
from mcore_ckpt.torchfile import load_file
from mcore_parallel.layout import TensorLayout

_MODEL, _FLAT = "model_optim_rng.pt", "distrib_optim.pt"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """A model-parallel rank and its folder."""

    folder: Path
    tp: int
    pp: int
    ep: int


def open_ranks(folder: Path, family: Family, optimizer: bool) -> Pieces:
    """Open such a checkpoint; errors as `MegatronCheckpoint.open`."""
    folders = sorted(entry for entry in folder.iterdir() if RANK_FOLDER.fullmatch(entry.name))
    where = folders[0] / _MODEL
    common = Common.of(load_file(where), where)
    model = common.model(family, where)
    degrees = Degrees.of(common.args)
    if degrees.experts and degrees.etp != degrees.tp:
        raise ValueError(
            f"{where}: expert_tensor_parallel_size={degrees.etp} beside "
            f"tensor_model_parallel_size={degrees.tp} is read from torch_dist checkpoints alone"
        )
    run = Run(family=family, model=model, degrees=degrees, where=str(folder))
    reading = _Reading(run, common)
    for rank in _ranks(folders, degrees):
        reading.add(rank, optimizer)
    return Pieces(
        model=model,
        source=reading.views,
        weights=resolved(run.whole(reading.weights, reading.dtypes)),
        states={
            kind: resolved(run.whole(parts, dict.fromkeys(parts, reading.state_dtypes[kind])))
            for kind, parts in reading.states.items()
        },
        iteration=common.iteration,
        optimizer_step=step_of(common.rest.get("optimizer")),
        consumed_samples=common.consumed_samples,
    )


def _ranks(folders: Sequence[Path], degrees: Degrees) -> Iterator[_Rank]:
    """Yield the ranks; ValueError when they are not those of the stored arguments."""
    count = (degrees.pp > 1) + (degrees.ep > 1)
    found = set()
    for folder in folders:
        match = RANK_FOLDER.fullmatch(folder.name)
        assert match is not None
        rest = [int(number) for number in match[2].split("_")[1:]]
        if len(rest) != count:
            raise ValueError(
                f"{folder}: with pp={degrees.pp} and ep={degrees.ep} it would have {count} more "
                f"numbers after the first"
            )
        rank = _Rank(
            folder=folder,
            tp=int(match[1]),
            pp=rest[0] if degrees.pp > 1 else 0,
            ep=rest[-1] if degrees.ep > 1 else 0,
        )
        found.add((rank.tp, rank.pp, rank.ep))
        yield rank
    for tp in range(degrees.tp):
        for pp in range(degrees.pp):
            for ep in range(degrees.ep):
                if (tp, pp, ep) not in found:
                    raise CheckpointError(
                        f"{folders[0].parent} lacks the folder of rank {tp} of tp={degrees.tp}, "
                        f"{pp} of pp={degrees.pp}, {ep} of ep={degrees.ep}"
                    )


class _Reading:
    """What the ranks' files come to, one after the other."""

    def __init__(self, run: Run, common: Common) -> None:
        self.views = Views()
        self.weights: Parts = defaultdict(dict)
        self.states: dict[str, Parts] = defaultdict(lambda: defaultdict(dict))
        self.dtypes: dict[str, torch.dtype] = {}
        self.state_dtypes: dict[str, torch.dtype] = {}
        self._run = run
        self._common = common

    def add(self, rank: _Rank, optimizer: bool) -> None:
        """Add a rank's files."""
        path = rank.folder / _MODEL
        held = load_file(path)
        trained: list[dict[str, torch.Tensor]] = []
        for chunk in range(self._run.degrees.virtual):
            key = "model" if self._run.degrees.virtual == 1 else f"model{chunk}"
            if not isinstance(held, Mapping) or not isinstance(held.get(key), Mapping):
                raise CheckpointError(f"{path} has no {key}")
            trained.append(self._model(held[key], rank, chunk, path))
        if not optimizer:
            return
        flat = rank.folder / _FLAT
        if flat.is_file():
            self._flat(load_file(flat), rank, trained, flat)
        elif held.get("optimizer") is not None:
            everything = {name: value for one in trained for name, value in one.items()}
            self._whole(held["optimizer"], rank, everything, path)

    def _model(
        self, held: Mapping[str, Any], rank: _Rank, chunk: int, path: Path
    ) -> dict[str, torch.Tensor]:
        """Add the weights of a chunk; return those that are trained, in order."""
        degrees = self._run.degrees
        layers, experts = degrees.layers_of(rank.pp, chunk), degrees.experts_of(rank.ep)
        names = set()
        for expert in (False, True):
            names |= {*self._run.parameters(rank.pp, chunk, experts, expert=expert)}
        trained = {}
        for own, value in held.items():
            name = self._run.family.canonical(own, layers.start, experts.start)
            if name is None or not isinstance(value, torch.Tensor):
                continue
            layout = self._view(f"{rank.folder.name}/{chunk}/{own}", value, path)
            self.weights[name].setdefault(rank.tp, layout)
            self.dtypes[name] = value.dtype
            if name in names:
                trained[name] = value
        return trained

    def _view(self, key: str, value: torch.Tensor, path: Path) -> TensorLayout:
        self.views.add(key, value, str(path))
        return TensorLayout.whole(key, tuple(value.shape))

    def _state(self, kind: str, name: str, rank: _Rank, layout: TensorLayout) -> None:
        self.states[kind][name].setdefault(rank.tp, layout)

    def _flat(
        self, held: Any, rank: _Rank, trained: Sequence[Mapping[str, torch.Tensor]], path: Path
    ) -> None:
        """Add state that lies in flat buffers: one optimizer's, or that of experts beside it."""
        for number, one in enumerate(held if isinstance(held, list) else [held]):
            for buffer, by_dtype in (one or {}).items():
                if not isinstance(buffer, int):
                    continue
                if len(by_dtype) != 1:
                    raise ValueError(f"{path}: parameters of several dtypes are not supported here")
                (stored,) = by_dtype.values()
                shapes = {
                    name: tuple(value.shape)
                    for name, value in trained[buffer].items()
                    if is_expert(name) == (number > 0)
                }
                for kind in (MASTER, *_MOMENTS):
                    key = f"{rank.folder.name}/{number}.{buffer}/{kind}"
                    value = _joined(stored, kind, path)
                    self._view(key, value, path)
                    self.state_dtypes[kind] = value.dtype
                    lengths = bucket_lengths(
                        shapes, len(value), self._common.args, f"{path}: {kind}"
                    )
                    for name, layout in parts_of(shapes, key, lengths, f"{path}: {kind}"):
                        self._state(kind, name, rank, layout)

    def _whole(
        self, held: Any, rank: _Rank, trained: Mapping[str, torch.Tensor], path: Path
    ) -> None:
        """Add state that lies in a tensor for each parameter, by its number."""
        for number, one in enumerate(held if isinstance(held, list) else [held]):
            inner = one.get("optimizer", one)
            masters = [value for group in one.get("fp32_from_fp16_params", ()) for value in group]
            names = list(_numbered(inner["param_groups"], trained, path))
            if masters and len(masters) != len(names):
                raise ValueError(f"{path}: {len(masters)} masters for {len(names)} parameters")
            for place, (index, name) in enumerate(names):
                values = {kind: inner["state"][index][kind] for kind in _MOMENTS}
                if masters:
                    values[MASTER] = masters[place]
                for kind, value in values.items():
                    if value.shape != trained[name].shape:
                        raise ValueError(
                            f"{path}: {kind} {index} has shape {list(value.shape)}, {name} "
                            f"{list(trained[name].shape)}"
                        )
                    layout = self._view(f"{rank.folder.name}/{number}/{kind}/{name}", value, path)
                    self.state_dtypes[kind] = value.dtype
                    self._state(kind, name, rank, layout)


def _joined(stored: Any, kind: str, path: Path) -> torch.Tensor:
    """Return a flat buffer, whether it is one tensor or one for each bucket."""
    try:
        if isinstance(stored, list):
            return torch.cat([bucket[kind] for bucket in stored])
        value = stored[kind]
        count = stored.get("numel_unpadded", len(value))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from None
    found: torch.Tensor = value[:count]
    return found


def _numbered(
    groups: Sequence[Mapping[str, Any]], trained: Mapping[str, torch.Tensor], path: Path
) -> Iterator[tuple[int, str]]:
    """Yield number and name of the parameters of an optimizer's groups.

    A group has the matrices, or biases and norms, of experts or of everything else, in order.
    """
    for group in groups:
        decays, expert = group.get("wd_mult", 1.0) != 0, bool(group.get("is_expert_parallel"))
        names = [
            name
            for name, value in trained.items()
            if is_expert(name) == expert and (value.dim() > 1) == decays
        ]
        if len(names) != len(group["params"]):
            raise ValueError(
                f"{path}: a group of the optimizer has {len(group['params'])} parameters, and the "
                f"model has {len(names)} of its kind"
            )
        yield from zip(group["params"], names, strict=True)
