"""The tensors of a live model, as its ranks hold them, put together as another format has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_ckpt.agreement import together
from mcore_ckpt.dtypes import stored_type
from mcore_ckpt.importing import select
from mcore_ckpt.planning import describe, layouts_of
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor, TensorLayout, check_tiling, plan, transfer
from mcore_parallel.mapping import MappedReader, Resolved, TensorMapping, TensorMeta


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """Global tensors as the ranks of a group hold them; the same on every rank but for `local`.

    metas: shape and dtype of each. layouts: by rank and local key. holders: who has some of it, by
    the tensor's name. local: this rank's own tensors.
    """

    group: Group
    metas: Mapping[str, TensorMeta]
    layouts: Mapping[int, Mapping[str, TensorLayout]]
    holders: Mapping[str, Sequence[tuple[int, str]]]
    local: Mapping[str, torch.Tensor]

    @staticmethod
    def over(tensors: Mapping[str, LayoutTensor], group: Group, prefix: str, what: str) -> Held:
        """Return what all ranks hold together; every rank calls it with its own.

        prefix: only tensors whose global names begin with it, by the rest of the name.

        Raises:
            ValueError: on every rank: dtypes differ, or fragments do not tile a tensor exactly once
                per replica.
        """
        selected = {key: select(value, prefix) for key, value in tensors.items()}
        selected = {key: value for key, value in selected.items() if value.layout.fragments}
        described: list[dict[str, Any]] = together(group, what, lambda: describe(selected))
        layouts = {
            rank: layouts_of(entry) for rank, entry in zip(group.ranks, described, strict=True)
        }
        metas: dict[str, TensorMeta] = {}
        holders: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for rank, entry in zip(group.ranks, described, strict=True):
            for key, layout in layouts[rank].items():
                dtype = stored_type(entry[key]["dtype"]).torch
                for f in layout.fragments:
                    meta = metas.setdefault(f.name, TensorMeta(f.global_shape, dtype))
                    if meta.dtype != dtype:
                        raise ValueError(f"{f.name}: held as {meta.dtype} and as {dtype}")
                for name in layout.names():
                    holders[name].append((rank, key))
        check_tiling(layout for held in layouts.values() for layout in held.values())
        return Held(
            group=group,
            metas=metas,
            layouts=layouts,
            holders=holders,
            local={key: value.tensor for key, value in selected.items()},
        )


class Exporter:
    """Puts the tensors of a mapping's other side together from what ranks hold.

    mapping: between the other format and ours.
    """

    def __init__(self, held: Held, mapping: TensorMapping, what: str) -> None:
        self._held = held
        self._what = what
        self.resolved: Resolved = mapping.inverse(held.metas)

    def collect(self, wanted: Sequence[str | None]) -> torch.Tensor | None:
        """Return the whole tensor `wanted[rank in group]` on each rank; every rank calls it.

        Elements cross ranks where they have to, and go straight to their places.

        Raises:
            CheckpointError: on every rank: one lacked the memory.
        """
        held, group = self._held, self._held.group
        targets: dict[int, dict[str, TensorLayout]] = {
            rank: {} if name is None else self._parts(name)
            for rank, name in zip(group.ranks, wanted, strict=True)
        }
        needed = {name for parts in targets.values() for p in parts.values() for name in p.names()}
        sources: dict[int, dict[str, TensorLayout]] = {rank: {} for rank in group.ranks}
        for name in sorted(needed):
            for rank, key in held.holders[name]:
                sources[rank][key] = held.layouts[rank][key]
        buffers: dict[str, torch.Tensor] = {}
        local: dict[str, torch.Tensor] = {}
        own = group.ranks[group.rank]

        def allocate() -> None:
            local.update({key: held.local[key].detach().cpu().contiguous() for key in sources[own]})
            for key, layout in targets[own].items():
                dtype = held.metas[layout.names()[0]].dtype if layout.fragments else torch.uint8
                buffers[key] = torch.empty(layout.shape, dtype=dtype)

        together(group, self._what, allocate, passing=())
        transfer(plan(sources, targets), local, buffers, group)
        mine = wanted[group.rank]
        if mine is None:
            return None
        if self.resolved.is_plain(mine):
            return buffers[mine]
        return MappedReader(self.resolved, lambda name, box: buffers[name][box.slices]).read(mine)

    def _parts(self, name: str) -> dict[str, TensorLayout]:
        """Return what has to be sent to whoever wants a tensor: itself, or what goes into it."""
        if self.resolved.is_plain(name):
            return {name: self.resolved.target(name).layout}
        metas = self._held.metas
        return {
            source: TensorLayout.whole(source, metas[source].shape)
            for source in self.resolved.sources(name)
        }
