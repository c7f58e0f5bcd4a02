"""Loading: each rank reads the chunks its own layouts need, once, and fills its tensors."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mcore_ckpt.addresses import storage_at
from mcore_ckpt.agreement import together
from mcore_ckpt.dtypes import converts, copy_into, stored_type
from mcore_ckpt.engine import Engine
from mcore_ckpt.finding import find, open_for_all
from mcore_ckpt.reading import Part, Reader, cut_out, inside
from mcore_ckpt.scanning import Scan
from mcore_ckpt.selection import Selection, renamed
from mcore_ckpt.sharing import Twins, pass_on
from mcore_ckpt.storage import Readable
from mcore_ckpt.targets import (
    LoadReport,
    Strictness,
    compare,
    describe_targets,
    enforce,
)
from mcore_parallel.group import Group
from mcore_parallel.layout import Box, Fragment, LayoutTensor


def load(
    path: str | os.PathLike[str],
    tensors: Mapping[str, LayoutTensor],
    group: Group | None = None,
    *,
    strict: Strictness = "error",
    prefixes: Sequence[str] | None = None,
    patterns: Sequence[str] | None = None,
    rename: Sequence[tuple[str, str]] = (),
    verify: bool = True,
    scan: Scan = "none",
    share: bool = False,
    storage: Readable | None = None,
    engine: Engine | None = None,
) -> LoadReport:
    """Fill local tensors in place from a checkpoint, whatever layout it was saved under.

    Every rank of `group` (default: this process alone) calls it; without `share` only metadata
    crosses ranks, over the group's CPU twin. Each rank reads the chunks that hold some of what its
    layouts name.

    path: a checkpoint, or the directory of several: then the newest committed one. A path, or an
        address as for `save`.
    tensors: this rank's local tensors by any local key. Values are converted to a tensor's dtype;
        between floating-point types only. Padding becomes zero.
    strict: what happens when the checkpoint lacks a tensor, has one that nobody wants, or has it in
        another shape: "error"; or "warn" and load the rest, or load it and only "report" by what is
        returned. What does not fit keeps its values.
    prefixes: take only tensors whose names start with one of these into account, such as
        `["model/"]` for weights without optimizer state. Others keep their values.
    patterns: take tensors into account whose names match one of these, such as
        `["model/layers.[0-3].*"]` (and those of `prefixes`, where both are given).
    rename: rules that turn names of the checkpoint into those of `tensors`, such as
        `[("model/encoder[.](.*)", "model/{1}")]`: a regular expression for a whole name, and what
        takes its place, with `{1}` for its first group; the first that matches counts. Prefixes,
        patterns and errors are of the new names.
    verify: compare every chunk that is read with its checksum.
    scan: look at the whole checkpoint before anything is filled (see `find`): "quick" at its files,
        "full" at every byte. In a directory what is damaged is passed over for the one before.
    share: ranks that want the same, such as data-parallel replicas, read a part of it each, and
        give it to the others, over `group` where all tensors are on GPUs, else over its CPU twin.
        Worth it where a shared disk is slower than the network between the ranks. The same on
        every rank.
    storage, engine: in place of the file system (`path` is then a name within it, "" for the
        newest), and of plain files.

    Raises:
        FileNotFoundError: on every rank: there is no committed checkpoint at `path`.
        ValueError: on every rank: something does not fit (all of it is named); or a pattern, or all
            of the prefixes, select nothing.
        CheckpointError: on every rank: the checkpoint is damaged; names the tensor, the chunk and
            the file. Some tensors may have been filled by then.
    """
    if strict not in ("error", "warn", "report"):
        raise ValueError(f"strict is {strict!r}; it is 'error', 'warn' or 'report'")
    if engine is None:
        from mcore_ckpt.default_engine import DefaultEngine

        engine = DefaultEngine()
    whole_group = group or Group.single()
    group = whole_group.cpu
    what = f"loading {os.fspath(path)} failed"
    if scan != "none":
        found = find(path, group, scan=scan, storage=storage)
        path = path if found is None else found.path
    parent, name, manifest = open_for_all(path, group, what, storage)
    stored = renamed(manifest.tensors, rename)
    manifest = replace(
        manifest, tensors={new: manifest.tensors[old] for new, old in stored.items()}
    )
    selection = Selection(prefixes=prefixes, patterns=patterns)
    asked = together(group, what, lambda: [share, describe_targets(tensors, selection)])
    sharing = [rank for rank, (shares, _) in enumerate(asked) if shares]
    if 0 < len(sharing) < group.size:
        raise ValueError(f"share is set on ranks {sharing} alone; set it on all or none")
    report = compare(manifest, [wanted for _, wanted in asked], selection)
    where = f"{parent}/{name}"
    enforce(report, where, strict)
    twins = Twins.of(tensors, group, what) if share and group.size > 1 else None
    passed: dict[str, list[tuple[Fragment, int]]] = {}

    def fill() -> None:
        reader = Reader(
            storage=storage or storage_at(parent),
            checkpoint=name,
            manifest=manifest,
            engine=engine,
            verify=verify,
            stored=stored,
        )
        passed.update(_Loading(reader=reader, selection=selection, twins=twins).run(tensors))

    together(group, what, fill)
    if twins is not None:
        pass_on(tensors, passed, twins, whole_group, verify=verify)
    return report


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Part of a local tensor (a view of its box's shape) that lies within one chunk.

    key, fragment: of the local tensor, and what says where in it the part is.
    """

    key: str
    fragment: Fragment
    view: torch.Tensor

    @property
    def box(self) -> Box:
        return self.fragment.box


@dataclass(frozen=True, kw_only=True)
class _Loading:
    reader: Reader
    selection: Selection
    twins: Twins | None

    def run(self, tensors: Mapping[str, LayoutTensor]) -> dict[str, list[tuple[Fragment, int]]]:
        """Read every chunk needed once and copy it to all places that want some of it.

        With twins, read a share of the chunks. Returns the parts of the local tensors and which of
        the twins reads them.
        """
        pieces: dict[tuple[str, int], list[_Piece]] = defaultdict(list)
        for key, value in tensors.items():
            takes = [self._takes(f, value.tensor) for f in value.layout.fragments]
            if all(takes) and value.layout.covered < value.layout.numel:
                value.tensor.detach().zero_()
            for (fragment, view), take in zip(value.views(), takes, strict=True):
                if take:
                    self._cut(key, fragment, view, pieces)
        order = sorted(pieces)
        passed: dict[str, list[tuple[Fragment, int]]] = defaultdict(list)
        if self.twins is not None:
            infos = self.reader.manifest.tensors
            readers = self.twins.readers([infos[name].chunk_bytes for name, _ in order])
            for at, reader in zip(order, readers, strict=True):
                for piece in pieces[at]:
                    passed[piece.key].append((piece.fragment, reader))
            mine = self.twins.place
            order = [at for at, reader in zip(order, readers, strict=True) if reader == mine]
        parts = [
            Part(name=name, number=number, box=_hull([piece.box for piece in pieces[name, number]]))
            for name, number in order
        ]

        def fill(number: int, data: torch.Tensor) -> None:
            part = parts[number]
            for piece in pieces[part.name, part.number]:
                copy_into(piece.view, cut_out(data, piece.box, part.box))

        self.reader.visit(parts, fill)
        return passed

    def _takes(self, fragment: Fragment, tensor: torch.Tensor) -> bool:
        """Return whether this fragment is loaded: selected, and fits what the checkpoint has."""
        info = self.reader.manifest.tensors.get(fragment.name)
        return (
            info is not None
            and fragment.name in self.selection
            and info.shape == fragment.global_shape
            and converts(stored_type(info.dtype).torch, tensor.dtype)
        )

    def _cut(
        self,
        key: str,
        fragment: Fragment,
        view: torch.Tensor,
        pieces: dict[tuple[str, int], list[_Piece]],
    ) -> None:
        grid = self.reader.manifest.tensors[fragment.name].grid
        for number in grid.overlapping(fragment.box):
            box = grid.box(number).intersect(fragment.box)
            assert box is not None
            pieces[fragment.name, number].append(
                _Piece(key=key, fragment=fragment.cut(box), view=view[inside(box, fragment.box)])
            )


def _hull(boxes: Sequence[Box]) -> Box:
    if len(boxes) == 1:
        return boxes[0]
    start = tuple(map(min, zip(*(box.start for box in boxes), strict=True)))
    stop = tuple(map(max, zip(*(box.stop for box in boxes), strict=True)))
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))
