"""Going on from what the machines of a run kept themselves."""

from __future__ import annotations

import warnings
from pathlib import Path

import mcore_ckpt
from mcore_ckpt.finding import on_first_rank
from mcore_ckpt.local import FoundLocal, find_local
from mcore_parallel import Group
from mcore_train.checkpoint_config import CheckpointConfig
from mcore_train.state import WhatToSave

_BASE = "newest_checkpoint"


def local_state(what: WhatToSave, checkpoint: Path | None) -> dict[str, object]:
    """Return the state of a local save, which knows the newest checkpoint of its run, too."""
    return {**what.state, _BASE: None if checkpoint is None else _step_of(checkpoint)}


def find_local_start(
    config: CheckpointConfig, start: tuple[mcore_ckpt.Found, bool] | None, group: Group
) -> FoundLocal | None:
    """Return the local save to go on from: one of this run, newer than its checkpoint `start`.

    One that followed a checkpoint which is no longer in the directory does not count, with a
    warning: whoever removed that wants to go on from an earlier one. All ranks call it.
    """
    directory = config.directory
    if config.local is None or directory is None or not config.resume:
        return None
    found = find_local(config.local, group)
    if found is None or found.state["config"]["checkpoint"]["directory"] != str(directory):
        return None
    if start is not None and start[1] and start[0].step >= found.step:
        return None
    base, newest = found.state.get(_BASE), _newest_step(directory, group)
    if base is not None and (newest is None or newest < base):
        if group.rank == 0:
            warnings.warn(
                f"the local save of step {found.step} is passed over: it followed step {base}, "
                f"which is no longer in {directory}",
                RuntimeWarning,
                stacklevel=2,
            )
        return None
    return found


def _newest_step(directory: Path, group: Group) -> int | None:
    """Return the newest step that was committed, whole or not, as rank 0 sees it."""

    def look() -> int | None:
        steps = [_step_of(path) for path in mcore_ckpt.list_checkpoints(directory)]
        return max(steps, default=None)

    return on_first_rank(group.cpu, f"listing the checkpoints of {directory} failed", look)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_").partition(".")[0])
