"""What a load wants, compared with what a checkpoint has."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from mcore_ckpt.dtypes import converts, stored_type
from mcore_ckpt.manifest import Manifest
from mcore_ckpt.selection import Selection
from mcore_parallel.layout import LayoutTensor

Strictness = Literal["error", "warn", "report"]
_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What did not fit in a load, over all ranks, sorted.

    missing: tensors that a rank wanted and the checkpoint lacks. unexpected: tensors that the
    checkpoint has and no rank wanted. mismatched: tensors of another shape, or of a kind of dtype
    that does not convert, with both sides. step: of the checkpoint.
    """

    step: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = []
        for what in ("missing", "unexpected", "mismatched"):
            names: tuple[str, ...] = getattr(self, what)
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                parts.append(f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}")
        return "; ".join(parts)


def describe_targets(
    tensors: Mapping[str, LayoutTensor], selection: Selection
) -> dict[str, list[Any]]:
    """Return the wanted global tensors as JSON: name → global shape and dtype.

    Raises:
        ValueError: a local tensor cannot be filled in place, or two of its fragments disagree.
    """
    wanted: dict[str, list[Any]] = {}
    for key, value in tensors.items():
        if not value.tensor.is_contiguous():
            raise ValueError(f"{key}: cannot load into a tensor that is not contiguous")
        try:
            dtype = stored_type(value.tensor.dtype).name
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
        for f in value.layout.fragments:
            if f.name not in selection:
                continue
            known = wanted.setdefault(f.name, [list(f.global_shape), dtype])
            if known[0] != list(f.global_shape):
                raise ValueError(
                    f"{f.name}: wanted with global shape {known[0]} and {list(f.global_shape)}"
                )
    return wanted


def compare(
    manifest: Manifest, wanted: Iterable[Mapping[str, list[Any]]], selection: Selection
) -> LoadReport:
    """Return what does not fit between a checkpoint and what all ranks want.

    A tensor without elements is never missed: layouts need not name it at all.

    Raises:
        ValueError: the selection selects nothing, neither there nor here.
    """
    wanted = list(wanted)
    selection.of([*manifest.tensors, *chain.from_iterable(wanted)])
    missing: set[str] = set()
    mismatched: set[str] = set()
    named: set[str] = set()
    for of_rank in wanted:
        named |= of_rank.keys()
        for name, (shape, dtype) in of_rank.items():
            info = manifest.tensors.get(name)
            if info is None:
                if 0 not in shape:
                    missing.add(name)
            elif list(info.shape) != shape:
                mismatched.add(f"{name} (checkpoint {list(info.shape)}, here {shape})")
            elif not converts(stored_type(info.dtype).torch, stored_type(dtype).torch):
                mismatched.add(f"{name} (checkpoint {info.dtype}, here {dtype})")
    have = {name for name, info in manifest.tensors.items() if name in selection and info.num_bytes}
    return LoadReport(
        step=manifest.step,
        missing=tuple(sorted(missing)),
        unexpected=tuple(sorted(have - named)),
        mismatched=tuple(sorted(mismatched)),
    )


def enforce(report: LoadReport, where: str, strict: Strictness) -> None:
    """Raise ValueError, warn, or let it be when something does not fit."""
    if strict == "report" or not str(report):
        return
    message = f"{where} does not fit: {report}"
    if strict == "error":
        raise ValueError(message)
    warnings.warn(message, RuntimeWarning, stacklevel=3)
