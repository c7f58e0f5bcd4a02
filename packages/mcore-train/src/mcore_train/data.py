"""From indexed files to the micro-batches of a rank: one reader per replica, then a broadcast.

All ranks with the same data-parallel coordinate form a replica and train on the same samples. Its
first rank reads them; the others receive. `mcore_data` knows ranks and sizes as ints only, so the
communication is here.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_data import (
    BlendLoader,
    BlendSampler,
    MicroBatch,
    MicroBatchLoader,
    ValidationLoader,
)
from mcore_data.tokenizers import load_tokenizer, tokenizer_files
from mcore_models import TokenBatch
from mcore_parallel import Group, ParallelMesh, broadcast, broadcast_object
from mcore_train.config import TrainConfig
from mcore_train.families import family_of
from mcore_train.sources import open_datasets

_SOURCE = "source."


class ReplicaData:
    """The micro-batches of this rank's replica, read by its first rank and broadcast.

    Under context parallelism each rank then keeps its share of every document.
    Samples are taken epoch by epoch, each in another order, as a function of seed and consumed
    samples alone: the order depends neither on the number of replicas nor on the length of the
    run, and a run can go on at any sample. The same holds for every source of a blend, whose
    weights may have changed when it goes on.
    """

    def __init__(self, config: TrainConfig, mesh: ParallelMesh) -> None:
        self.config = config
        self.mesh = mesh
        self.datasets = open_datasets(config)
        sampler = self.datasets.sampler
        kind: Callable[..., MicroBatchLoader] = (
            BlendLoader if isinstance(sampler, BlendSampler) else MicroBatchLoader
        )
        self.loader = kind(
            self.datasets.train,
            sampler,
            dp_rank=mesh.dp.rank,
            dp_size=mesh.dp.size,
            micro_batch_size=config.batch.micro_size,
        )

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """The names of the validation sets; one without a name of its own is `validation`."""
        return tuple(self.datasets.validation)

    def batches(self) -> Iterator[list[TokenBatch]]:
        """Yield the micro-batches of one step after another, from where the loader stands."""
        while True:
            yield self._share(lambda: next(self.loader))

    def validation_batches(self, name: str) -> list[TokenBatch]:
        """Return this replica's share of a set's windows, equally many on every replica.

        Rows beyond the last window have loss mask 0.
        """
        source = self.datasets.validation[name]
        loader = ValidationLoader(
            source,
            dp_rank=self.mesh.dp.rank,
            dp_size=self.mesh.dp.size,
            micro_batch_size=self.config.batch.micro_size,
            num_samples=min(self.config.evaluate.windows, len(source)),
        )
        return self._share(lambda: loader)

    def files(self) -> dict[str, Path | bytes]:
        """Return the tokenizer's folder, which travels with a checkpoint, where there is one."""
        return tokenizer_folder(self.config)

    def state_dict(self, consumed: int) -> dict[str, Any]:
        """Return what a checkpoint needs to go on after `consumed` samples, JSON-able."""
        return {**self.loader.state_at(consumed), "seq_length": self.config.data.seq_length}

    def counters(self, consumed: int) -> dict[str, float]:
        """Return how many of the first `consumed` samples came from each source of a blend."""
        sampler = self.loader.sampler
        if not isinstance(sampler, BlendSampler):
            return {}
        return {f"samples/{name}": count for name, count in sampler.counts(consumed).items()}

    def after(self, consumed: int) -> int:
        """Return the samples consumed after the step that follows `consumed`."""
        return self.loader.sampler.after(consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: the data have another number of samples, another length or another seed, so
                that samples would be repeated or left out.
        """
        length = self.config.data.seq_length
        if state["seq_length"] != length:
            raise ValueError(
                f"the run has consumed samples of {state['seq_length']} tokens and data.seq_length="
                f"{length}: use {state['seq_length']}, or start with checkpoint.reset_step"
            )
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """Stop reading ahead."""
        self.loader.close()

    def _read(self, source: Callable[[], Iterable[MicroBatch]]) -> list[TokenBatch]:
        batches = []
        for arrays in source():
            check_tokens(arrays, self.config.model.vocab_size)
            batches.append(family_of(self.config).batch(arrays, self.config))
        return batches

    def _share(self, source: Callable[[], Iterable[MicroBatch]]) -> list[TokenBatch]:
        """Read on the replica's first rank; what goes wrong there is raised on all of its ranks."""
        group = self.mesh.replica.cpu
        batches: list[TokenBatch] | None = None
        failure: Exception | None = None
        if group.rank == 0:
            try:
                batches = self._read(source)
            except Exception as error:  # raised below, on every rank of the replica
                failure = error
        message = broadcast_object(None if failure is None else str(failure), 0, group)
        if message is not None:
            raise ValueError(message) from failure
        cp, parallel = self.mesh.cp, self.mesh.config
        multiple = parallel.tp if parallel.sequence_parallel else 1
        whole = share_batches(batches, group)
        if depths := len(self.config.model.mtp_pattern):
            whole = [batch.look_ahead(depths) for batch in whole]
        shares = [batch.share(cp.rank, cp.size, multiple=multiple) for batch in whole]
        return [share.to(self.mesh.device) for share in shares]


def check_tokens(arrays: MicroBatch, vocab_size: int) -> None:
    """Check that every token and label is one that the model has.

    Raises:
        ValueError: names the sample, the token and the vocabulary that would hold it.
    """
    for name in ("tokens", "labels", "encoder_tokens"):
        if name not in arrays:
            continue
        if (lowest := int(arrays[name].min(initial=0))) < 0:
            row = int(np.argmin(arrays[name].min(axis=1)))
            raise ValueError(
                f"sample {arrays['sample_ids'][row]} of the data holds token {lowest}: its file is "
                "damaged, see mcore-data verify --vocab-size"
            )
        highest = int(arrays[name].max(initial=0))
        if highest >= vocab_size:
            row = int(np.argmax(arrays[name].max(axis=1)))
            raise ValueError(
                f"sample {arrays['sample_ids'][row]} of the data holds token {highest}: "
                f"model.vocab_size={vocab_size} is too small, use {highest + 1} or more"
            )


def share_batches(batches: list[TokenBatch] | None, group: Group) -> list[TokenBatch]:
    """Broadcast the micro-batches of the group's first rank; the others give None.

    Two collectives whatever the number of tensors: a header of shapes, and one block of bytes.
    """
    if group.size == 1:
        assert batches is not None
        return batches
    tensors = [value for batch in batches or [] for value in _tensors(batch).values()]
    header: list[dict[str, Any]] | None = None
    if batches is not None:
        header = [_describe(batch) for batch in batches]
    header = broadcast_object(header, 0, group)
    assert header is not None
    size = sum(_num_bytes(row["tensors"]) for row in header)
    if batches is not None:
        flat = [value.contiguous().view(-1).view(torch.uint8) for value in tensors]
        payload = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
    else:
        payload = torch.empty(size, dtype=torch.uint8)
    payload = broadcast(payload, 0, group) if size else payload
    return batches if batches is not None else _unpack(header, payload)


def _tensors(batch: TokenBatch) -> dict[str, Tensor]:
    """The tensors of a batch, and of what it reads behind `source.`, by name."""
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    found = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if batch.source is not None:
        found |= {_SOURCE + name: value for name, value in _tensors(batch.source).items()}
    return found


def _describe(batch: TokenBatch) -> dict[str, Any]:
    tensors = {name: (value.dtype, value.numel()) for name, value in _tensors(batch).items()}
    source = batch.source
    shapes = [None if part is None else (part.max_seqlen, part.uniform) for part in (batch, source)]
    return {"tensors": tensors, "shapes": shapes}


def _num_bytes(tensors: dict[str, tuple[torch.dtype, int]]) -> int:
    return sum(dtype.itemsize * size for dtype, size in tensors.values())


def _unpack(header: list[dict[str, Any]], payload: Tensor) -> list[TokenBatch]:
    batches, at = [], 0
    for row in header:
        tensors: dict[str, Any] = {}
        for name, (dtype, size) in row["tensors"].items():
            end = at + dtype.itemsize * size
            # clone: a view at an odd offset would not be aligned for its dtype
            tensors[name] = payload[at:end].clone().view(dtype)
            at = end
        own = {name: value for name, value in tensors.items() if not name.startswith(_SOURCE)}
        read = {name.removeprefix(_SOURCE): tensors[name] for name in tensors if name not in own}
        (longest, uniform), other = row["shapes"]
        source = None
        if other is not None:
            source = TokenBatch(max_seqlen=other[0], uniform=other[1], **read)
        batch = TokenBatch(max_seqlen=longest, uniform=uniform, source=source, **own)
        batches.append(batch)
    return batches


def tokenizer_folder(config: TrainConfig) -> dict[str, Path | bytes]:
    """The files that go with a checkpoint: those of the tokenizer, where there is one.

    One that is no folder (a file, or a name such as `byte`) goes as the folder that it saves.
    """
    source = config.data.tokenizer
    if source is None:
        return {}
    if source.is_dir():
        return {f"tokenizer/{path.name}": path for path in tokenizer_files(source)}
    with tempfile.TemporaryDirectory() as saved:
        load_tokenizer(source).save(saved)
        return {f"tokenizer/{path.name}": path.read_bytes() for path in tokenizer_files(saved)}
