"""Starting from a Hugging Face folder: its architecture, and its weights in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mcore_ckpt
from mcore_ckpt.finding import on_first_rank
from mcore_ckpt.hf import HFFolder, load_hf
from mcore_models import ModelConfig
from mcore_models.hf import ARCHITECTURES, differences
from mcore_parallel import Group
from mcore_parallel.layout import LayoutTensor
from mcore_train.session import Session

_CONFIG = "config.json"


def architecture_of(folder: str | Path) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that a folder's `config.json` describes.

    Raises:
        ValueError: there is none, the architecture is unknown or a field not supported.
    """
    try:
        model: ModelConfig = HFFolder.open(folder, known=ARCHITECTURES).model
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    return asdict(model)


def find_hf(folder: Path | str, group: Group) -> mcore_ckpt.Found | None:
    """Return what to start from when `folder` is one of Hugging Face, the same on every rank.

    Rank 0 of `group` looks, and all get its answer. None: it has no `config.json`, or is an
    address.

    Raises:
        ValueError: on every rank: the architecture is unknown or a field not supported.
    """

    def look() -> mcore_ckpt.Found | None:
        if not isinstance(folder, Path) or not (folder / _CONFIG).is_file():
            return None
        state = {"config": {"model": architecture_of(folder)}, "format": "hf"}
        return mcore_ckpt.Found(path=folder.absolute(), step=0, state=state)

    return on_first_rank(group.cpu, f"reading {folder} failed", look)


def is_hf(found: mcore_ckpt.Found) -> bool:
    """Return whether this came from `find_hf`."""
    return found.state.get("format") == "hf"


def without_adapters(tensors: Mapping[str, LayoutTensor]) -> dict[str, LayoutTensor]:
    """What of these local tensors is no adapter's: all that weights from elsewhere can fill."""
    return {
        key: value
        for key, value in tensors.items()
        if not any(".lora_" in name for name in value.layout.names())
    }


def load_hf_weights(session: Session, found: mcore_ckpt.Found, free: set[str]) -> None:
    """Fill the weights, masters included, each rank from its own bytes; all ranks call it.

    free: fields, such as `model.dropout`, that the config may have otherwise than the folder.

    Raises:
        ValueError: the config's architecture is not the folder's, or a tensor does not fit.
        mcore_ckpt.CheckpointError: a file is missing or damaged.
    """
    ours, theirs = session.config.model, ModelConfig(**found.state["config"]["model"])
    for name, now, there in differences(ours, theirs):
        if f"model.{name}" not in free:
            raise ValueError(
                f"model.{name}={now}, but {found.path} has {there}: use {there}, "
                f"or model.hf={found.path}"
            )
    # Read by our model: it may have what matters to training alone, such as a router's load.
    folder = replace(HFFolder.open(found.path, known=ARCHITECTURES), model=ours)
    tensors = without_adapters(session.optimizer.state_tensors())
    load_hf(folder, tensors, session.mesh.world, prefix="model/", known=ARCHITECTURES)
    session.optimizer.load_finished()
