"""Which of Megatron-LM's formats a folder has."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Literal

from mcore_ckpt.dcp.metadata import METADATA
from mcore_ckpt.errors import CheckpointError

Format = Literal["torch_dist", "fsdp_dtensor", "torch"]
TRACKER = "latest_checkpointed_iteration.txt"
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})((?:_\d{3,})*)")


def find_checkpoint(path: str | os.PathLike[str]) -> tuple[Path, Format]:
    """Return the folder of a checkpoint and its format.

    path: it, or the directory of several: then the one that its tracker file names.

    Raises:
        FileNotFoundError: nothing of that kind is there.
        ValueError: it has a format that is not read.
        CheckpointError: the tracker file, or `metadata.json`, is damaged.
    """
    folder = Path(path)
    tracker = folder / TRACKER
    if tracker.is_file():
        folder = folder / _tracked(tracker)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is missing, which {tracker} names")
    kind = _format(folder)
    if kind is None:
        raise FileNotFoundError(
            f"{folder} has neither metadata.json, {METADATA} nor mp_rank_… folders: no checkpoint "
            f"of Megatron-LM"
        )
    return folder, kind


def _tracked(tracker: Path) -> str:
    text = tracker.read_text().strip()
    if text == "release":
        return text
    if not text.isdecimal():
        raise CheckpointError(f"{tracker} has {text[:40]!r}, not a number")
    return f"iter_{int(text):07}"


def _format(folder: Path) -> Format | None:
    described = folder / "metadata.json"
    if described.is_file():
        try:
            backend = json.loads(described.read_bytes())["sharded_backend"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{described} is damaged: {error!r}") from None
        if backend != "torch_dist":
            raise ValueError(
                f"{described}: sharded_backend is {backend!r}, only 'torch_dist' is read: convert "
                f"it with the version of Megatron-LM that wrote it"
            )
        return "torch_dist"
    if not folder.is_dir():
        return None
    if any(RANK_FOLDER.fullmatch(entry.name) for entry in folder.iterdir()):
        return "torch"
    return "fsdp_dtensor" if (folder / METADATA).is_file() else None
