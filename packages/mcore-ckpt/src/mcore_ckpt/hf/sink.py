"""A Hugging Face folder as a sink of tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch

from mcore_ckpt.addresses import local_path
from mcore_ckpt.hf.source import INDEX
from mcore_ckpt.hf.writer import (
    DEFAULT_SHARD_BYTES,
    ShardWriter,
    begin_folder,
    discard_folder,
    finish_folder,
    index_of,
    plan_shards,
)
from mcore_parallel.mapping import TensorMeta


class SafetensorsSink:
    """Writes tensors into the safetensors files of a folder, one at a time.

    The folder appears when the context ends: what is under way lies in `<folder>.partial`.

    Args:
        folder: where it goes: a directory that is empty or not there.
        tensors: what will be written.
        files: other files of the folder, by name: `config.json` and the tokenizer's.
        max_shard_bytes: size at which another file is begun.

    Raises:
        ValueError: something is at `folder` already, or a dtype that safetensors does not have.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        tensors: Mapping[str, TensorMeta],
        *,
        files: Mapping[str, bytes] | None = None,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    ) -> None:
        self._folder = local_path(folder).absolute()
        self._files = dict(files or {})
        self._shards = plan_shards(tensors, max_shard_bytes)
        index = index_of(self._shards)
        if index is not None:
            self._files[INDEX] = index

    def write(self, name: str, value: torch.Tensor) -> None:
        """Write a tensor; ValueError when it is not what was announced."""
        self._writer.write(name, value)

    def __enter__(self) -> Self:
        self._partial = begin_folder(self._folder)
        self._writer = ShardWriter(self._partial, self._shards)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._writer.close()
                finish_folder(self._partial, self._folder, self._files)
        finally:
            self._writer.abandon()
            discard_folder(self._partial)  # not there any more when all went well
