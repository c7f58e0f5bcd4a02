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
    storage: Readable | None = None,
    engine: Engine | None = None,
) -> LoadReport:
    """Fill local tensors in place from a checkpoint, whatever layout it was saved under.

    Every rank of `group` (default: this process alone) calls it; only metadata crosses ranks, over
    the group's CPU twin. Each rank reads the chunks that hold some of what its layouts name.

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
    group = (group or Group.single()).cpu
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
    wanted = together(group, what, lambda: describe_targets(tensors, selection))
    report = compare(manifest, wanted, selection)
    where = f"{parent}/{name}"
    enforce(report, where, strict)

    def fill() -> None:
        reader = Reader(
            storage=storage or storage_at(parent),
            checkpoint=name,
            manifest=manifest,
            engine=engine,
            verify=verify,
            stored=stored,
        )
        _Loading(reader=reader, selection=selection).run(tensors)

    together(group, what, fill)
    return report


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Part of a local tensor (a view of its box's shape) that lies within one chunk."""

    box: Box
    view: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class _Loading:
    reader: Reader
    selection: Selection

    def run(self, tensors: Mapping[str, LayoutTensor]) -> None:
        """Read every chunk needed once and copy it to all places that want some of it."""
        pieces: dict[tuple[str, int], list[_Piece]] = defaultdict(list)
        for value in tensors.values():
            takes = [self._takes(f, value.tensor) for f in value.layout.fragments]
            if all(takes) and value.layout.covered < value.layout.numel:
                value.tensor.detach().zero_()
            for (fragment, view), take in zip(value.views(), takes, strict=True):
                if take:
                    self._cut(fragment, view, pieces)
        order = sorted(pieces)
        parts = [
            Part(name=name, number=number, box=_hull([piece.box for piece in pieces[name, number]]))
            for name, number in order
        ]

        def fill(number: int, data: torch.Tensor) -> None:
            part = parts[number]
            for piece in pieces[part.name, part.number]:
                copy_into(piece.view, cut_out(data, piece.box, part.box))

        self.reader.visit(parts, fill)

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
        fragment: Fragment,
        view: torch.Tensor,
        pieces: dict[tuple[str, int], list[_Piece]],
    ) -> None:
        grid = self.reader.manifest.tensors[fragment.name].grid
        for number in grid.overlapping(fragment.box):
            box = grid.box(number).intersect(fragment.box)
            assert box is not None
            pieces[fragment.name, number].append(
                _Piece(box=box, view=view[inside(box, fragment.box)])
            )


def _hull(boxes: Sequence[Box]) -> Box:
    if len(boxes) == 1:
        return boxes[0]
    start = tuple(map(min, zip(*(box.start for box in boxes), strict=True)))
    stop = tuple(map(max, zip(*(box.stop for box in boxes), strict=True)))
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))
