"""From a Hugging Face folder straight into the tensors of a live model."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mcore_ckpt.agreement import together
from mcore_ckpt.hf.architecture import Architecture
from mcore_ckpt.hf.folder import HFFolder
from mcore_ckpt.hf.source import SafetensorsFolder
from mcore_ckpt.importing import load_from
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor


def load_hf(
    folder: str | os.PathLike[str] | HFFolder,
    tensors: Mapping[str, LayoutTensor],
    group: Group | None = None,
    *,
    prefix: str = "",
    known: Mapping[str, Architecture] | None = None,
) -> None:
    """Fill local tensors in place from a Hugging Face folder, each rank reading only its own bytes.

    Every rank of `group` (default: this process alone) calls it; only metadata crosses ranks, over
    the group's CPU twin. All ranks see the same folder.

    tensors, prefix: as for `load_from`. known: as for `HFFolder.open`.

    Raises:
        FileNotFoundError: on every rank: there is no `config.json`, or there are no tensors.
        ValueError: on every rank: the architecture is unknown, a field not supported, or a tensor
            does not fit; names file and field, or file and tensor.
        CheckpointError: on every rank: a file is missing or damaged; names it.
    """
    group = (group or Group.single()).cpu
    opened: list[tuple[HFFolder, SafetensorsFolder]] = []

    def look() -> None:
        found = folder
        if not isinstance(found, HFFolder):
            found = HFFolder.open(found, known=known)
        opened.append((found, found.tensors()))

    path = folder.path if isinstance(folder, HFFolder) else folder
    what = f"loading {os.fspath(path)} failed"
    together(group, what, look, passing=(ValueError, FileNotFoundError))
    found, source = opened[0]
    load_from(source, tensors, found.mapping, group, prefix=prefix)
