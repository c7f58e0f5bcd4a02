"""Named global tensors, read by region, whatever they are stored in; and where they can go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Protocol, Self

import torch

from mcore_ckpt.checkpoint import Checkpoint
from mcore_ckpt.dtypes import stored_type
from mcore_parallel.layout import Box
from mcore_parallel.mapping import MappedReader, Resolved, TensorMeta

MODEL = "model/"
"""Prefix of the weights in a checkpoint."""


class TensorSource(Protocol):
    """Global tensors by name. Nothing but the region that is asked for is read."""

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""

    def meta(self, name: str) -> TensorMeta:
        """Return a tensor's shape and dtype without reading it; KeyError when there is none."""

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a region (default: all) as a new CPU tensor of the stored dtype, bit for bit.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the region leaves the tensor.
            CheckpointError: what is stored is damaged; names the tensor and the file.
        """

    def where(self, name: str) -> str:
        """Return where a tensor is stored, for messages."""


class TensorSink(Protocol):
    """Takes whole global tensors, one after the other, all of which were announced at the start.

    As a context: what was written is there when the context has ended, and nothing that could be
    taken for it is there before, or when it ends with an exception.
    """

    def write(self, name: str, value: torch.Tensor) -> None:
        """Store a tensor; ValueError when it is not what was announced."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish, or clean up after an error."""


def metas(source: TensorSource) -> dict[str, TensorMeta]:
    """Return shape and dtype of every tensor of a source."""
    return {name: source.meta(name) for name in source}


def check_announced(
    announced: Mapping[str, TensorMeta], name: str, value: torch.Tensor
) -> TensorMeta:
    """Return what was announced of a tensor; ValueError when `value` is something else."""
    if name not in announced:
        raise ValueError(f"{name} was not announced")
    meta = announced[name]
    if (tuple(value.shape), value.dtype) != (meta.shape, meta.dtype):
        raise ValueError(
            f"{name}: {value.dtype} of shape {list(value.shape)}, announced was {meta.dtype} of "
            f"shape {list(meta.shape)}"
        )
    return meta


class CheckpointWeights:
    """The weights of a checkpoint of ours as a source, under their names without `model/`.

    prefix: of other tensors in place of the weights, such as "exp_avg/".
    """

    def __init__(self, checkpoint: Checkpoint, prefix: str = MODEL) -> None:
        self.checkpoint = checkpoint
        self._prefix = prefix

    def __iter__(self) -> Iterator[str]:
        prefix = self._prefix
        return (name.removeprefix(prefix) for name in self.checkpoint if name.startswith(prefix))

    def meta(self, name: str) -> TensorMeta:
        """Return a tensor's shape and dtype; KeyError when there is none."""
        info = self.checkpoint.info(self._prefix + name)
        return TensorMeta(info.shape, stored_type(info.dtype).torch)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a region, every chunk of it compared with its checksum."""
        return self.checkpoint.read(self._prefix + name, box)

    def where(self, name: str) -> str:
        """Return the directory of the tensor's chunks."""
        return str(self.checkpoint.path / f"{self._prefix}{name}")


class Joined:
    """Tensors of several sources as one: `tensors` says of each name where it is."""

    def __init__(self, tensors: Mapping[str, tuple[TensorSource, str]]) -> None:
        self._tensors = dict(tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def meta(self, name: str) -> TensorMeta:
        """Return a tensor's shape and dtype; KeyError when there is none."""
        source, own = self._tensors[name]
        return source.meta(own)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a region (default: all) of a tensor."""
        source, own = self._tensors[name]
        return source.read(own, box)

    def where(self, name: str) -> str:
        """Return where a tensor is stored, for messages."""
        source, own = self._tensors[name]
        return source.where(own)


class MappedSource:
    """A source under the names of the other side of a mapping, region by region.

    resolved: how its tensors are made from those of `source`.
    """

    def __init__(self, source: TensorSource, resolved: Resolved) -> None:
        self._source = source
        self._resolved = resolved
        self._reader = MappedReader(resolved, source.read)

    def __iter__(self) -> Iterator[str]:
        return iter(self._resolved.tensors)

    def meta(self, name: str) -> TensorMeta:
        """Return a tensor's shape and dtype; KeyError when there is none."""
        mapped = self._resolved.tensors[name]
        return TensorMeta(mapped.shape, mapped.dtype)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a region, made from the regions of the source that it needs."""
        return self._reader.read(name, box)

    def where(self, name: str) -> str:
        """Return where the first of the tensors is stored that go into this one."""
        return self._source.where(self._resolved.sources(name)[0])

    def check_repeats(self) -> None:
        """Compare what was left out because it repeats another tensor with that tensor.

        Raises:
            ValueError: they differ; names both and the file.
        """
        for name, (repeat, original) in self._resolved.repeats.items():
            if not self._reader.same(repeat, original):
                raise ValueError(
                    f"{self._source.where(name)}: {name} must equal "
                    f"{original.layout.names()[0]}, which it is tied to, and does not"
                )
