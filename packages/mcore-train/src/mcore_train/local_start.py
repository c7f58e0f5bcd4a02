"""Going on from what the machines of a run kept themselves."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import mcore_ckpt
from mcore_ckpt.addresses import Address, Place
from mcore_ckpt.finding import on_first_rank
from mcore_ckpt.local import FoundLocal, find_local
from mcore_parallel import Group
from mcore_train.checkpoint_config import CheckpointConfig
from mcore_train.state import WhatToSave

_BASE = "newest_checkpoint"
_RUN = "run_directory"


def run_directory(directory: Path | str, group: Group) -> str:
    """Return what tells a run from others, however its directory is written; all ranks call it."""
    what = f"looking up {directory} failed"

    def look() -> str:
        return str(directory) if isinstance(directory, Address) else os.path.realpath(directory)

    return on_first_rank(group.cpu, what, look)


def local_state(what: WhatToSave, checkpoint: Place | None, run: str) -> dict[str, object]:
    """Return the state of a local save, which knows its run and that one's newest checkpoint."""
    base = None if checkpoint is None else _step_of(checkpoint)
    return {**what.state, _BASE: base, _RUN: run}


def find_local_start(
    config: CheckpointConfig, start: tuple[mcore_ckpt.Found, bool] | None, group: Group
) -> FoundLocal | None:
    """Return the local save to go on from: one of this run, newer than its checkpoint `start`.

    What does not count is passed over with a warning: a save of another run, and one that followed
    a checkpoint which is no longer in the directory (whoever removed that wants to go on from an
    earlier one). All ranks call it.
    """
    directory = config.directory
    if config.local is None or directory is None or not config.resume:
        return None
    found = find_local(config.local, group)
    if found is None:
        return None
    own = run_directory(directory, group)
    # Saves of earlier releases have the directory only as it was written in the config.
    run = str(found.state.get(_RUN) or found.state["config"]["checkpoint"]["directory"])
    if run not in (own, str(directory)):
        _pass_over(found, f"it is of the run in {run}, this one is in {own}", group)
        return None
    if start is not None and start[1] and start[0].step >= found.step:
        return None
    base, newest = found.state.get(_BASE), _newest_step(directory, group)
    if base is not None and (newest is None or newest < base):
        _pass_over(found, f"it followed step {base}, which is no longer in {directory}", group)
        return None
    return found


def _pass_over(found: FoundLocal, why: str, group: Group) -> None:
    if group.rank == 0:
        text = f"the local save of step {found.step} is passed over: {why}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _newest_step(directory: Path | str, group: Group) -> int | None:
    """Return the newest step that was committed, whole or not, as rank 0 sees it."""

    def look() -> int | None:
        steps = [_step_of(path) for path in mcore_ckpt.list_checkpoints(directory)]
        return max(steps, default=None)

    return on_first_rank(group.cpu, f"listing the checkpoints of {directory} failed", look)


def _step_of(checkpoint: Place) -> int:
    return int(checkpoint.name.removeprefix("step_").partition(".")[0])
