"""Filling the tensors of a live model from any source, by region, through a mapping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mcore_ckpt.agreement import together
from mcore_ckpt.dtypes import converts
from mcore_ckpt.sources import MappedSource, TensorSource, metas
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor, TensorLayout
from mcore_parallel.mapping import MappedReader, Resolved, TensorMapping

_SHOWN = 4


def load_from(
    source: TensorSource,
    tensors: Mapping[str, LayoutTensor],
    mapping: TensorMapping | None = None,
    group: Group | None = None,
    *,
    prefix: str = "",
) -> None:
    """Fill local tensors in place from a source, each rank reading the regions that it holds.

    Every rank of `group` (default: this process alone) calls it with a source of its own over the
    same files; only metadata crosses ranks, over the group's CPU twin.

    tensors: this rank's local tensors by any local key. Values are converted to a tensor's dtype;
        between floating-point types only. Padding becomes zero.
    mapping: from the names of the source to ours; None: they are ours.
    prefix: only tensors whose global names begin with it are filled, from what is called the rest
        of the name: "model/" leaves an optimizer's moments alone.

    Raises:
        ValueError: on every rank: source, mapping and tensors do not fit together: a tensor is
            missing, wanted by no rank, or of another shape or kind of dtype; names it.
        CheckpointError: on every rank: the source is damaged; names the tensor and the file. Some
            tensors may have been filled by then.
    """
    group = (group or Group.single()).cpu
    what = "loading failed"
    resolved: list[Resolved] = []
    selected = {key: select(value, prefix) for key, value in tensors.items()}

    def prepare() -> list[str]:
        resolved.append((mapping or TensorMapping(())).forward(metas(source)))
        for key, value in selected.items():
            _check(key, value, resolved[0])
        return sorted({name for value in selected.values() for name in value.layout.names()})

    wanted = {name for names in together(group, what, prepare) for name in names}
    unwanted = sorted(
        name
        for name, mapped in resolved[0].tensors.items()
        if name not in wanted and mapped.layout.numel
    )
    if unwanted:
        where = source.where(resolved[0].sources(unwanted[0])[0])
        raise ValueError(f"{where} has {_some(unwanted)}, which no rank holds")

    def run() -> None:
        reader = MappedReader(resolved[0], source.read)
        if group.rank == 0:
            MappedSource(source, resolved[0]).check_repeats()
        for key, value in selected.items():
            if value.layout.fragments:
                whole = len(value.layout.fragments) == len(tensors[key].layout.fragments)
                if whole and value.layout.covered < value.layout.numel:
                    value.tensor.detach().zero_()
                reader.fill(value)

    together(group, what, run)


def select(value: LayoutTensor, prefix: str) -> LayoutTensor:
    """Return a local tensor with the fragments whose names begin with `prefix`, without it."""
    fragments = tuple(
        replace(f, name=f.name.removeprefix(prefix))
        for f in value.layout.fragments
        if f.name.startswith(prefix)
    )
    return LayoutTensor(value.tensor, TensorLayout(shape=value.layout.shape, fragments=fragments))


def _check(key: str, value: LayoutTensor, resolved: Resolved) -> None:
    if not value.tensor.is_contiguous():
        raise ValueError(f"{key}: cannot load into a tensor that is not contiguous")
    for f in value.layout.fragments:
        mapped = resolved.tensors.get(f.name)
        if mapped is None:
            raise ValueError(f"{f.name} is missing")
        if mapped.shape != f.global_shape:
            raise ValueError(
                f"{f.name} has shape {list(mapped.shape)}, here it is {list(f.global_shape)}"
            )
        if not converts(mapped.dtype, value.tensor.dtype):
            raise ValueError(f"{f.name} is {mapped.dtype}, here it is {value.tensor.dtype}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
