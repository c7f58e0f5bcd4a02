"""A checkpoint written again: other chunks, fewer tensors, other names, another dtype."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from mcore_ckpt.addresses import Place, absolute
from mcore_ckpt.checkpoint import Checkpoint
from mcore_ckpt.convert import check_target
from mcore_ckpt.dtypes import stored_type
from mcore_ckpt.grid import DEFAULT_CHUNK_BYTES
from mcore_ckpt.progress import Advance
from mcore_ckpt.selection import Selection, renamed
from mcore_ckpt.sinks import CheckpointSink
from mcore_parallel.mapping import TensorMeta


def rewrite(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    patterns: Sequence[str] | None = None,
    rename: Sequence[tuple[str, str]] = (),
    dtype: torch.dtype | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    compression: str | None = None,
    file_bytes: int | None = None,
    advance: Advance | None = None,
) -> Place:
    """Write a checkpoint again below `directory`, and return the new one's path.

    A checkpoint has no layout, so none of this is needed to load it under another one. One tensor
    is in memory at a time; step, state and files are kept.

    source: a checkpoint, or the directory of several: then the newest.
    patterns: only tensors whose names match one of them.
    rename: rules for the names, see `mcore_ckpt.selection.renamed`.
    dtype: of floating-point tensors; default: as they are, bit for bit.
    chunk_bytes, compression, file_bytes: how the new one lies on disk (see `mcore_ckpt.save`).
    advance: told of the bytes that have been read.

    Raises:
        FileNotFoundError: there is no committed checkpoint at the source.
        ValueError: the directory is not empty, a pattern or rule matches nothing, two tensors come
            to one name, or `chunk_bytes` is below 1.
        CheckpointError: the source is damaged.
    """
    for limit, most in (("chunk_bytes", chunk_bytes), ("file_bytes", file_bytes)):
        if most is not None and most < 1:
            raise ValueError(f"{limit} is {most}; nearest valid: 1")
    opened = Checkpoint(source)
    names = renamed(Selection(patterns=patterns).of(opened), rename)
    metas = {}
    for new, old in names.items():
        info = opened.info(old)
        stored = stored_type(info.dtype).torch
        converts = dtype is not None and stored.is_floating_point
        metas[new] = TensorMeta(info.shape, dtype if converts and dtype else stored)
    check_target("native", absolute(directory))
    sink = CheckpointSink(
        directory,
        metas,
        step=opened.step,
        state=opened.state,
        files={name: opened.file(name) for name in opened.manifest.files},
        prefix="",
        chunk_bytes=chunk_bytes,
        compression=compression,
        file_bytes=file_bytes,
    )
    with sink:
        for new, old in names.items():
            value = opened.read(old)
            sink.write(new, value.to(metas[new].dtype))
            if advance:
                advance(value.numel() * value.element_size())
    return sink.path
