"""What a checkpoint holds, as one value and as text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_ckpt.commit import read_manifest, resolve


def summarise(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a checkpoint's contents as JSON values: tensors, files, state, sizes in bytes.

    `path` is a checkpoint, or the directory of several: then the newest committed one.

    Raises:
        FileNotFoundError: there is no committed checkpoint.
        CheckpointError: its manifest is damaged.
    """
    located = resolve(path)
    manifest = read_manifest(located.storage, located.name)
    return {
        "path": str(located.place),
        "step": manifest.step,
        "version": manifest.version,
        "producer": dict(manifest.producer),
        "tensors": {
            tensor: {
                "dtype": info.dtype,
                "shape": list(info.shape),
                "bytes": info.num_bytes,
                "chunks": info.grid.num_chunks,
                **({} if info.codec is None else {"codec": str(info.codec)}),
            }
            for tensor, info in manifest.tensors.items()
        },
        "files": {file: info.num_bytes for file, info in manifest.files.items()},
        "state": dict(manifest.state),
        "total_bytes": sum(info.num_bytes for info in manifest.tensors.values()),
    }


def render(summary: Mapping[str, Any]) -> str:
    """Return a summary as a tree: prefixes with their sizes, and below each its tensors."""
    producer = ", ".join(f"{name} {version}" for name, version in summary["producer"].items())
    lines = [
        str(Path(summary["path"]).name),
        f"  step {summary['step']}, format version {summary['version']}, written by {producer}",
    ]
    groups: dict[str, dict[str, Any]] = {}
    for name, info in summary["tensors"].items():
        prefix, _, rest = name.rpartition("/")
        groups.setdefault(prefix, {})[rest] = info
    for prefix, tensors in groups.items():
        size = _size(sum(info["bytes"] for info in tensors.values()))
        lines.append(f"  {prefix}/  {count(len(tensors), 'tensor')}, {size}")
        names = max(map(len, tensors))
        shapes = max(len(str(info["shape"])) for info in tensors.values())
        lines += (
            f"    {name:<{names}}  {info['dtype']:<8}  {info['shape']!s:<{shapes}}  "
            f"{_size(info['bytes'])}" + (f"  {info['codec']}" if "codec" in info else "")
            for name, info in tensors.items()
        )
    if summary["files"]:
        lines.append(f"  files/  {count(len(summary['files']), 'file')}")
        lines += (f"    {name}  {_size(size)}" for name, size in summary["files"].items())
    if summary["state"]:
        lines.append(f"  state: {', '.join(summary['state'])}")
    total = count(len(summary["tensors"]), "tensor")
    lines.append(f"  total: {total}, {_size(summary['total_bytes'])}")
    return "\n".join(lines)


def count(number: int, noun: str) -> str:
    """Return `1 tensor`, `2 tensors`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
