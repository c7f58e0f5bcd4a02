"""Loading a local save into tensors of any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from mcore_ckpt.agreement import together
from mcore_ckpt.dtypes import converts, stored_type
from mcore_ckpt.grid import DEFAULT_CHUNK_BYTES
from mcore_ckpt.local.finding import FoundLocal
from mcore_ckpt.manifest import Manifest, TensorInfo
from mcore_ckpt.planning import layouts_of, tensor_table
from mcore_ckpt.selection import Selection
from mcore_ckpt.targets import (
    LoadReport,
    Strictness,
    compare,
    describe_targets,
    enforce,
)
from mcore_parallel.group import Group
from mcore_parallel.layout import (
    Fragment,
    LayoutTensor,
    TensorLayout,
    gather_layouts,
    plan,
    transfer,
)


def load_local(
    found: FoundLocal,
    tensors: Mapping[str, LayoutTensor],
    group: Group | None = None,
    *,
    strict: Strictness = "error",
    prefixes: Sequence[str] | None = None,
) -> LoadReport:
    """Fill local tensors in place from a local save, under whatever layout that was made.

    Every rank of `group` calls it, the one that `find_local` was called with. Each rank reads the
    shares that it provides; what others need of them they get over the group's CPU twin.

    Arguments besides `found`, and errors, are those of `mcore_ckpt.load`.

    Raises:
        ValueError: on every rank: something does not fit (all of it is named).
        CheckpointError: on every rank: a share is damaged; names the tensor and the file. Tensors
            keep their values.
    """
    group = (group or Group.single()).cpu
    what = f"loading step {found.step} from {found.path} failed"
    wanted = together(group, what, lambda: describe_targets(tensors, Selection(prefixes=prefixes)))
    table = tensor_table(dict(enumerate(found.descriptions)), DEFAULT_CHUNK_BYTES)
    report = compare(Manifest(step=found.step, tensors=table), wanted, Selection(prefixes=prefixes))
    enforce(report, str(found.path), strict)
    sources: dict[str, torch.Tensor] = {}

    def read() -> None:
        for rank, share in found.shares.items():
            sources.update({f"{rank}/{key}": value for key, value in share.read().items()})

    together(group, what, read)
    held: dict[int, dict[str, TensorLayout]] = {rank: {} for rank in group.ranks}
    for saved_by, description in enumerate(found.descriptions):
        provider = group.ranks[found.providers[saved_by]]
        for key, layout in layouts_of(description).items():
            held[provider][f"{saved_by}/{key}"] = layout
    layouts = {key: _fitting(value, table, prefixes) for key, value in tensors.items()}
    copies = plan(held, gather_layouts(layouts, group))
    for key, value in tensors.items():
        if layouts[key] == value.layout and value.layout.covered < value.layout.numel:
            value.tensor.detach().zero_()
    transfer(copies, sources, {key: value.tensor for key, value in tensors.items()}, group)
    return report


def _fitting(
    value: LayoutTensor, table: Mapping[str, TensorInfo], prefixes: Sequence[str] | None
) -> TensorLayout:
    """Return the layout with those fragments alone that are loaded: selected, and as they are."""

    def fits(fragment: Fragment) -> bool:
        info = table.get(fragment.name)
        return (
            info is not None
            and fragment.name in Selection(prefixes=prefixes)
            and info.shape == fragment.global_shape
            and converts(stored_type(info.dtype).torch, value.tensor.dtype)
        )

    return replace(value.layout, fragments=tuple(filter(fits, value.layout.fragments)))
