"""From indexed files to the micro-batches of a rank: one reader per replica, then a broadcast.

All ranks with the same data-parallel coordinate form a replica and train on the same samples. Its
first rank reads them; the others receive. `mcore_data` knows ranks and sizes as ints only, so the
communication is here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_data import (
    BatchSampler,
    GPTDataset,
    IndexedReader,
    MicroBatch,
    MicroBatchLoader,
    Sample,
    SampleSource,
    Tokenizer,
    ValidationLoader,
    document_ranges,
    load_tokenizer,
)
from mcore_data.tokenizers import tokenizer_files
from mcore_models import TokenBatch
from mcore_parallel import Group, ParallelMesh, broadcast, broadcast_object
from mcore_train.config import DataConfig, TrainConfig

MOCK_SAMPLES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Datasets:
    """What a reader of samples has: training, validation (None without), and the tokenizer."""

    train: SampleSource
    validation: SampleSource | None
    tokenizer: Tokenizer | None


class MockSamples:
    """Random tokens: sample i is a function of (seed, i). For benchmarks and parity."""

    def __init__(self, num_samples: int, seq_length: int, vocab_size: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.seed = seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        rng = np.random.default_rng((self.seed, index))
        text = rng.integers(0, self.vocab_size, self.seq_length + 1, dtype=np.int64)
        return Sample(
            tokens=text[:-1],
            labels=text[1:],
            loss_mask=np.ones(self.seq_length, np.float32),
            positions=np.arange(self.seq_length, dtype=np.int64),
            cu_seqlens=np.array([0, self.seq_length], np.int32),
        )


def open_datasets(config: TrainConfig) -> Datasets:
    """Open the files that `config.data` names.

    Raises:
        ValueError: a file is missing or damaged, or too short for one sample; or the tokenizer has
            more tokens than the model.
    """
    data = config.data
    if data.mock:
        size, vocabulary = data.seq_length, config.model.vocab_size
        return Datasets(
            train=MockSamples(MOCK_SAMPLES, size, vocabulary, config.seed),
            validation=MockSamples(config.evaluate.windows, size, vocabulary, config.seed + 1),
            tokenizer=None,
        )
    if data.train is None:
        raise ValueError("data.train is not set: give a prefix of .bin/.idx files, or data.mock")
    tokenizer = None if data.tokenizer is None else load_tokenizer(data.tokenizer)
    _check_vocabulary(config, tokenizer)
    reader = IndexedReader(data.train)
    if data.validation is None:
        other, documents = reader, document_ranges(data.split, len(reader))
    else:
        other = IndexedReader(data.validation)
        documents = (range(len(reader)), range(len(other)))

    def dataset(source: IndexedReader, chosen: range) -> GPTDataset:
        return GPTDataset(
            source,
            chosen,
            seq_length=data.seq_length,
            seed=config.seed,
            eod_id=end_of_document(data, tokenizer),
            reset_positions=data.reset_positions,
            reset_attention=data.reset_attention,
            mask_eod_loss=data.mask_eod_loss,
            mask_after_eod=data.mask_after_eod,
            cache_dir=data.cache,
        )

    return Datasets(
        train=dataset(reader, documents[0]),
        validation=dataset(other, documents[1]) if documents[1] else None,
        tokenizer=tokenizer,
    )


def end_of_document(data: DataConfig, tokenizer: Tokenizer | None) -> int | None:
    """The token that ends a document: the config's, else the tokenizer's."""
    if data.eod_id is not None or tokenizer is None:
        return data.eod_id
    return tokenizer.eod_id


def _check_vocabulary(config: TrainConfig, tokenizer: Tokenizer | None) -> None:
    size = config.model.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > size:
        raise ValueError(
            f"model.vocab_size={size} is smaller than the {tokenizer.vocab_size} tokens of "
            f"{config.data.tokenizer}: use vocab_size {tokenizer.vocab_size} or more"
        )


class ReplicaData:
    """The micro-batches of this rank's replica, read by its first rank and broadcast.

    Under context parallelism each rank then keeps its share of every document.
    Samples are taken epoch by epoch, each in another order, as a function of seed and consumed
    samples alone: the order depends neither on the number of replicas nor on the length of the
    run, and a run can go on at any sample.
    """

    def __init__(self, config: TrainConfig, mesh: ParallelMesh) -> None:
        self.config = config
        self.mesh = mesh
        self.datasets = open_datasets(config)
        train = self.datasets.train
        sampler = BatchSampler(len(train), config.batch.global_size, config.seed, shuffle=True)
        self.loader = MicroBatchLoader(
            train,
            sampler,
            dp_rank=mesh.dp.rank,
            dp_size=mesh.dp.size,
            micro_batch_size=config.batch.micro_size,
        )

    @property
    def has_validation(self) -> bool:
        """Whether there are validation samples."""
        return self.datasets.validation is not None

    def batches(self) -> Iterator[list[TokenBatch]]:
        """Yield the micro-batches of one step after another, from where the loader stands."""
        while True:
            yield self._share(lambda: next(self.loader))

    def validation_batches(self) -> list[TokenBatch]:
        """Return this replica's share of the validation windows, equally many on every replica.

        Rows beyond the last window have loss mask 0.
        """
        source = self.datasets.validation
        assert source is not None
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
        return {
            "consumed_samples": consumed,
            "sampler": self.loader.sampler.state(),
            "seq_length": self.config.data.seq_length,
        }

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
        packed, vocabulary = self.config.data.reset_attention, self.config.model.vocab_size
        batches = []
        for arrays in source():
            check_tokens(arrays, vocabulary)
            batches.append(flat_batch(arrays, packed=packed))
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
        shares = [
            batch.share(cp.rank, cp.size, multiple=multiple)
            for batch in share_batches(batches, group)
        ]
        return [share.to(self.mesh.device) for share in shares]


def check_tokens(arrays: MicroBatch, vocab_size: int) -> None:
    """Check that every token and label is one that the model has.

    Raises:
        ValueError: names the sample, the token and the vocabulary that would hold it.
    """
    for name in ("tokens", "labels"):
        highest = int(arrays[name].max(initial=0))
        if highest >= vocab_size:
            row = int(np.argmax(arrays[name].max(axis=1)))
            raise ValueError(
                f"sample {arrays['sample_ids'][row]} of the data holds token {highest}: "
                f"model.vocab_size={vocab_size} is too small, use {highest + 1} or more"
            )


def flat_batch(arrays: MicroBatch, *, packed: bool) -> TokenBatch:
    """Return a micro-batch of `mcore_data` ([B, S] arrays) as the model takes it.

    packed: attention stays inside the documents of a sample.
    """
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
    return TokenBatch.from_samples(
        tensors["tokens"],
        labels=tensors["labels"],
        loss_mask=tensors["loss_mask"],
        positions=tensors["positions"],
        sample_ids=tensors["sample_ids"],
        cu_seqlens=tensors["cu_seqlens"] if packed else None,
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
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _describe(batch: TokenBatch) -> dict[str, Any]:
    tensors = {name: (value.dtype, value.numel()) for name, value in _tensors(batch).items()}
    return {"tensors": tensors, "max_seqlen": batch.max_seqlen, "uniform": batch.uniform}


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
        batches.append(TokenBatch(max_seqlen=row["max_seqlen"], uniform=row["uniform"], **tensors))
    return batches


def tokenizer_folder(config: TrainConfig) -> dict[str, Path | bytes]:
    """The files that go with a checkpoint: those of the tokenizer, where there is one."""
    folder = config.data.tokenizer
    if folder is None or not folder.is_dir():
        return {} if folder is None else {"tokenizer": folder}
    return {f"tokenizer/{path.name}": path for path in tokenizer_files(folder)}
