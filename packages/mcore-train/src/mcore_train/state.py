"""A run's state in a checkpoint: tensors by layout, the rest as JSON."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mcore_ckpt
from mcore_ckpt.addresses import Place
from mcore_ckpt.extra import PREFIX
from mcore_ckpt.finding import on_first_rank
from mcore_ckpt.local import FoundLocal, load_local
from mcore_models import ModelConfig
from mcore_models.adapters import LoRAConfig
from mcore_models.parts import TRAINING_FIELDS
from mcore_parallel import Group
from mcore_parallel.layout import LayoutTensor
from mcore_train.checkpoint_config import CheckpointConfig, Strict
from mcore_train.config import TrainConfig
from mcore_train.extra import extra_values, restore_values, state_tensors
from mcore_train.from_hf import find_hf, is_hf, load_hf_weights, without_adapters
from mcore_train.load import config_to_tree, from_tree
from mcore_train.session import Session

WEIGHTS = ("model/",)
FREE = {
    *("model.dropout", "model.init_std", "model.init_depth_scaled"),
    *(f"model.moe.{name}" for name in TRAINING_FIELDS),
}
"""Fields of the architecture that may change when training goes on."""


@dataclass(kw_only=True)
class Progress:
    """How far a run is: finished optimizer steps and consumed training samples."""

    step: int = 0
    consumed: int = 0


@dataclass(frozen=True, kw_only=True)
class WhatToSave:
    """All there is of a run at one step, on one rank: arguments of `mcore_ckpt.save`.

    The tensors are those that training goes on with, no copies.
    """

    step: int
    tensors: Mapping[str, LayoutTensor]
    state: Mapping[str, Any]
    files: Mapping[str, Path | bytes]


@dataclass(frozen=True, kw_only=True)
class WhatToLoad:
    """What of a checkpoint a run takes over: the fields of `CheckpointConfig` of these names."""

    weights_only: bool = False
    reset_step: bool = False
    load_optimizer: bool = True
    load_rng: bool = True
    strict: Strict = "error"

    @staticmethod
    def of(config: CheckpointConfig) -> WhatToLoad:
        """Return what the config says of `load`."""
        return WhatToLoad(**{f.name: getattr(config, f.name) for f in fields(WhatToLoad)})

    @property
    def optimizer(self) -> bool:
        """Whether the optimizer goes on from where it was."""
        return self.load_optimizer and not self.weights_only

    @property
    def prefixes(self) -> tuple[str, ...] | None:
        """Which tensors are loaded, by the beginnings of their names; None: all."""
        if self.optimizer:
            return None
        return WEIGHTS if self.weights_only else (*WEIGHTS, PREFIX)


def what_to_save(session: Session, progress: Progress, callbacks: Mapping[str, Any]) -> WhatToSave:
    """Return weights, optimizer, progress, random streams and callback states of this moment.

    What modules keep beside their parameters is among it. Communicates over pp.
    """
    return WhatToSave(
        step=progress.step,
        tensors=state_tensors(session),
        state={
            "config": config_to_tree(session.config),
            "step": progress.step,
            "data": session.data.state_dict(progress.consumed),
            "optimizer": session.optimizer.state_dict(),
            "scaler": None if session.scaler is None else session.scaler.state_dict(),
            "rng": session.rng.state_dict(),
            "callbacks": dict(callbacks),
            "extra": extra_values(session),
        },
        files=session.data.files(),
    )


def find_start(config: CheckpointConfig, group: Group) -> tuple[mcore_ckpt.Found, bool] | None:
    """Return the checkpoint to start from, and whether it continues this very run.

    Rank 0 of `group` looks, and all get its answer: their views of a shared disk may differ.

    Raises:
        ValueError: `load` names a place without a committed checkpoint, or a Hugging Face folder
            without `weights_only`; or `directory` holds another run's that is not to be resumed.
    """
    if config.directory is not None:
        newest = mcore_ckpt.find(config.directory, group, scan=config.scan)
        if newest is not None and config.resume:
            return newest, True
        if newest is not None:
            raise ValueError(
                f"checkpoint.directory={config.directory} holds step {newest.step} of another run: "
                f"give an empty folder, or set checkpoint.resume"
            )
    if config.load is None:
        return None
    folder = find_hf(config.load, group)
    if folder is not None:
        if not config.weights_only:
            raise ValueError(
                f"checkpoint.load={config.load} is a Hugging Face folder, which holds weights "
                f"alone: set checkpoint.weights_only"
            )
        return folder, False
    place: Path | str = config.load
    if config.load_step is not None:
        place = _of_step(place, config.load_step, group)
    found = mcore_ckpt.find(place, group, scan=config.scan)
    if found is None:
        raise ValueError(f"checkpoint.load={config.load}: no committed checkpoint there")
    return found, False


def _of_step(folder: Path | str, step: int, group: Group) -> Place:
    """Return the checkpoint of a step in a folder; ValueError with the nearest there is."""

    def look() -> Place:
        found = {int(p.name[5:].partition(".")[0]): p for p in mcore_ckpt.list_checkpoints(folder)}
        if not found:
            raise ValueError(
                f"checkpoint.load_step={step}: {folder} is no folder of committed checkpoints"
            )
        if step not in found:
            nearest = min(found, key=lambda other: (abs(other - step), other))
            raise ValueError(
                f"checkpoint.load_step={step}: {folder} has no such checkpoint: use {nearest}"
            )
        return found[step]

    return on_first_rank(group.cpu, f"listing the checkpoints of {folder} failed", look)


def check_same_model(
    config: TrainConfig, found: mcore_ckpt.Found | FoundLocal, what: WhatToLoad
) -> list[str]:
    """Check that the architecture (and the optimizer) are those the checkpoint was trained with.

    Shapes alone do not tell: another number of heads, say, fits the same tensors. Fields that were
    not there when it was written have the values that they would have been left at. Return what
    differs, where that is let pass.

    Raises:
        ValueError: names the first field that differs, with both values.
    """
    saved, now = found.state["config"], config_to_tree(config)
    model = config_to_tree(from_tree(ModelConfig, saved["model"]))
    fields = list(_pairs(model, now["model"], "model."))
    if what.optimizer:
        kinds = saved["optimizer"]["kind"], now["optimizer"]["kind"]
        fields.append(("optimizer.kind", *kinds))
    passed = []
    for name, old, new in fields:
        if old == new or name in FREE:
            continue
        difference = f"{name}={new}, but {found.path} was trained with {old}"
        if name == "optimizer.kind":
            raise ValueError(
                f"{difference}: use {old}, or take the weights alone (checkpoint.load with "
                f"weights_only, or with load_optimizer=false)"
            )
        if what.strict == "error":
            raise ValueError(f"{difference}: use {old}")
        passed.append(difference)
    return passed


def begins_adapters(
    config: TrainConfig, found: mcore_ckpt.Found | FoundLocal, *, weights_only: bool
) -> bool:
    """Whether the config has adapters that the checkpoint lacks, and begins with its weights.

    Raises:
        ValueError: adapters of another kind, or none on one side where that loses some.
    """
    saved = found.state["config"].get("lora")
    before = None if saved is None else from_tree(LoRAConfig, saved)
    now = config.lora
    if before is None:
        if now is not None and not weights_only:
            raise ValueError(
                f"lora.rank={now.rank}, but {found.path} was trained without adapters: take its "
                f"weights alone (checkpoint.load with weights_only)"
            )
        return now is not None
    if now is None:
        raise ValueError(
            f"{found.path} was trained with adapters (lora.rank={before.rank}): give the same "
            f"lora, or merge them first with mcore-train merge"
        )
    for field in fields(LoRAConfig):
        old, new = getattr(before, field.name), getattr(now, field.name)
        if old != new and field.name != "dropout":
            raise ValueError(
                f"lora.{field.name}={new}, but {found.path} was trained with {old}: use {old}"
            )
    return False


def _pairs(
    saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Any, Any]]:
    """Yield every field that both have, with both values; mappings on both sides are entered."""
    for name in (name for name in now if name in saved):
        if isinstance(now[name], Mapping) and isinstance(saved[name], Mapping):
            yield from _pairs(saved[name], now[name], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", saved[name], now[name]


def _check_complete(found: mcore_ckpt.Found | FoundLocal, what: WhatToLoad) -> None:
    """Check that a checkpoint, which may have been converted, has what is asked of it."""
    if what.optimizer and "optimizer" not in found.state:
        raise ValueError(f"{found.path} holds weights alone: set checkpoint.load with weights_only")
    goes_on = not (what.weights_only or what.reset_step)
    if goes_on and not {"rng", "data"} <= found.state.keys():
        raise ValueError(
            f"{found.path} was converted, and has no place in the data: set checkpoint.load with "
            f"reset_step, or with weights_only"
        )


def load_state(
    session: Session, found: mcore_ckpt.Found | FoundLocal, what: WhatToLoad
) -> tuple[Progress, dict[str, Any]]:
    """Fill the session from a checkpoint of any layout; return progress and callback states.

    With `reset_step` steps and samples are counted from 0, on whatever data the config has; weights
    and moments are kept. With `weights_only` everything but the weights starts afresh. What does
    not fit and is let pass is a RuntimeWarning, or a line on stderr, of the first rank.

    Raises:
        ValueError: tensors do not fit, by name and shape; the optimizer is of another kind; or the
            run cannot go on with these data.
    """
    if isinstance(found, mcore_ckpt.Found) and is_hf(found):
        load_hf_weights(session, found, FREE)
        return Progress(), {}
    _check_complete(found, what)
    passed = check_same_model(session.config, found, what)
    tensors = state_tensors(session)
    if begins_adapters(session.config, found, weights_only=what.weights_only):
        tensors = without_adapters(tensors)
    report = _load_tensors(session, found, tensors, what)
    passed += [str(report)] if str(report) else []
    session.optimizer.load_finished()
    state = found.state
    if not what.weights_only:
        values = state.get("extra", {})
        passed += restore_values(session, values, strict=what.strict == "error")
    if passed and session.mesh.rank == 0:
        _tell(f"{found.path} does not fit: {'; '.join(passed)}", what.strict)
    if what.optimizer:
        session.optimizer.load_state_dict(state["optimizer"])
        if session.scaler is not None and state.get("scaler") is not None:
            session.scaler.load_state_dict(state["scaler"])
    if what.weights_only or what.reset_step:
        return Progress(), {}
    if what.load_rng:
        session.rng.load_state_dict(state["rng"])
    session.data.load_state_dict(state["data"])
    progress = Progress(step=state["step"], consumed=state["data"]["consumed_samples"])
    return progress, state["callbacks"]


def _load_tensors(
    session: Session,
    found: mcore_ckpt.Found | FoundLocal,
    tensors: Mapping[str, LayoutTensor],
    what: WhatToLoad,
) -> mcore_ckpt.LoadReport:
    """Fill the tensors that are wanted; what does not fit is an error, or is returned."""
    world, prefixes = session.mesh.world, what.prefixes
    strict: Strict = "error" if what.strict == "error" else "report"
    if isinstance(found, FoundLocal):
        return load_local(found, tensors, world, prefixes=prefixes, strict=strict)
    return mcore_ckpt.load(found.path, tensors, world, prefixes=prefixes, strict=strict)


def _tell(text: str, strict: Strict) -> None:
    if strict == "warn":
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    else:
        print(f"mcore-train: {text}", file=sys.stderr)
