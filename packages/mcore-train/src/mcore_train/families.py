"""What families of models learn from: their samples, and micro-batches as the model takes them.

The one place of training that tells families apart; whatever else differs, the models know.
B samples of S positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mcore_data import (
    BERTDataset,
    GPTDataset,
    IndexedReader,
    MaskedSample,
    MaskingConfig,
    MicroBatch,
    MockDataset,
    SampleSource,
    SpanConfig,
    SpanSample,
    T5Dataset,
)
from mcore_data.datasets.bert import choose_words, mask_tokens
from mcore_data.datasets.t5 import corrupt_spans
from mcore_models import TokenBatch
from mcore_models.bert import padded_batch
from mcore_train.config import TrainConfig
from mcore_train.denoising import SpanOptions


class Family(Protocol):
    """How a family's data are read."""

    def count(self, reader: IndexedReader) -> int:
        """Return how many documents a file has that can be divided into parts."""
        ...

    def samples(
        self, reader: IndexedReader, documents: range, config: TrainConfig, eod_id: int | None
    ) -> SampleSource:
        """Return one epoch of the samples of some documents; ValueError when there are none."""
        ...

    def mock(self, count: int, config: TrainConfig, seed: int) -> SampleSource:
        """Return `count` random samples."""
        ...

    def batch(self, arrays: MicroBatch, config: TrainConfig) -> TokenBatch:
        """Return a micro-batch of `mcore_data` ([B, S] arrays) as the model takes it."""
        ...


class _GPT:
    """Windows of a stream of tokens, each to be told from those before it."""

    def count(self, reader: IndexedReader) -> int:
        return len(reader)

    def samples(
        self, reader: IndexedReader, documents: range, config: TrainConfig, eod_id: int | None
    ) -> SampleSource:
        data = config.data
        return GPTDataset(
            reader,
            documents,
            seq_length=data.seq_length,
            seed=config.seed,
            eod_id=eod_id,
            reset_positions=data.reset_positions,
            reset_attention=data.reset_attention,
            mask_eod_loss=data.mask_eod_loss,
            mask_after_eod=data.mask_after_eod,
            cache_dir=data.cache,
        )

    def mock(self, count: int, config: TrainConfig, seed: int) -> SampleSource:
        return MockDataset(count, config.data.seq_length, config.model.vocab_size, seed)

    def batch(self, arrays: MicroBatch, config: TrainConfig) -> TokenBatch:
        return flat_batch(arrays, packed=config.data.reset_attention)


class _Bert:
    """Texts with masks, in two segments; padding is a document of its own."""

    def count(self, reader: IndexedReader) -> int:
        return reader.num_documents

    def samples(
        self, reader: IndexedReader, documents: range, config: TrainConfig, eod_id: int | None
    ) -> SampleSource:
        options, data = config.data.masking, config.data
        assert options is not None
        return BERTDataset(
            reader,
            documents,
            seq_length=data.seq_length,
            masking=MaskingConfig(
                mask_id=options.mask_id,
                cls_id=options.cls_id,
                sep_id=options.sep_id,
                vocab_size=config.model.vocab_size,
                rate=options.rate,
                max_words=options.max_words,
            ),
            pairs=options.pairs,
            seed=config.seed,
            pad_id=options.pad_id,
            short_rate=options.short_rate,
            cache_dir=data.cache,
        )

    def mock(self, count: int, config: TrainConfig, seed: int) -> SampleSource:
        return _MockMasked(count, config.data.seq_length, config.model.vocab_size, seed)

    def batch(self, arrays: MicroBatch, config: TrainConfig) -> TokenBatch:
        tensors = _tensors(arrays)
        bounds, size = tensors["cu_seqlens"], arrays["tokens"].shape[1]
        begins = bounds[:-1] % size == 0
        labels = torch.full((len(bounds) - 1,), -1)
        # Samples that only fill up a batch count in no loss.
        asked = tensors["pair_label"].masked_fill(tensors["sample_ids"] < 0, -1)
        labels[begins] = asked.reshape(-1)
        return dataclasses.replace(
            flat_batch(arrays, packed=True),
            token_types=tensors["token_types"].flatten(),
            document_labels=labels,
        )


class _T5:
    """Texts with spans left out, for the encoder, and the spans, for the decoder."""

    def count(self, reader: IndexedReader) -> int:
        return reader.num_documents

    def samples(
        self, reader: IndexedReader, documents: range, config: TrainConfig, eod_id: int | None
    ) -> SampleSource:
        options, data = config.data.spans, config.data
        assert options is not None
        return T5Dataset(
            reader,
            documents,
            seq_length=data.seq_length,
            target_length=options.target_length,
            spans=_span_config(options),
            seed=config.seed,
            pad_id=options.pad_id,
            short_rate=options.short_rate,
            cache_dir=data.cache,
        )

    def mock(self, count: int, config: TrainConfig, seed: int) -> SampleSource:
        return _MockSpans(count, config.data.seq_length, config.model.vocab_size, seed)

    def batch(self, arrays: MicroBatch, config: TrainConfig) -> TokenBatch:
        tensors = _tensors(arrays)
        bounds, size = tensors["cu_seqlens"].long(), arrays["tokens"].shape[1]
        lengths = bounds.diff()[bounds[:-1] % size == 0]
        ids = tensors["sample_ids"]
        source = padded_batch(
            tensors["encoder_tokens"], tensors["encoder_length"].reshape(-1), sample_ids=ids
        )
        return dataclasses.replace(
            padded_batch(
                tensors["tokens"],
                lengths,
                sample_ids=ids,
                labels=tensors["labels"],
                loss_mask=tensors["loss_mask"],
            ),
            source=source,
        )


FAMILIES: Mapping[str, Family] = {"gpt": _GPT(), "bert": _Bert(), "t5": _T5()}
"""By `ModelConfig.family`."""


def family_of(config: TrainConfig) -> Family:
    """The family of the config's model."""
    return FAMILIES[config.model.family]


def flat_batch(arrays: MicroBatch, *, packed: bool) -> TokenBatch:
    """Return a micro-batch of `mcore_data` ([B, S] arrays) as a decoder takes it.

    packed: attention stays inside the documents of a sample.
    """
    tensors = _tensors(arrays)
    return TokenBatch.from_samples(
        tensors["tokens"],
        labels=tensors["labels"],
        loss_mask=tensors["loss_mask"],
        positions=tensors["positions"],
        sample_ids=tensors["sample_ids"],
        cu_seqlens=tensors["cu_seqlens"] if packed else None,
    )


def _tensors(arrays: MicroBatch) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in arrays.items()}


def _span_config(options: SpanOptions) -> SpanConfig:
    return SpanConfig(
        sentinel_ids=options.sentinels,
        bos_id=options.bos_id,
        eos_id=options.eos_id,
        rate=options.rate,
        mean_length=options.mean_length,
    )


@dataclasses.dataclass(frozen=True)
class _MockMasked:
    """Random texts with masks; sample i is a function of (seed, i). The first ids are special."""

    num_samples: int
    seq_length: int
    vocab_size: int
    seed: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> MaskedSample:
        size = self.seq_length
        rng = np.random.default_rng((self.seed, index))
        config = MaskingConfig(mask_id=3, cls_id=1, sep_id=2, vocab_size=self.vocab_size)
        count = int(rng.integers(size // 2, size + 1))
        text = rng.integers(4, self.vocab_size, count, dtype=np.int64)
        text[0], cut = 1, int(rng.integers(1, count - 1))
        text[cut] = text[-1] = 2
        chosen = choose_words(text, config, rng)
        tokens, labels = np.zeros((2, size), np.int64)
        tokens[:count], labels[:count] = mask_tokens(text, chosen, config, rng), text
        mask = np.zeros(size, np.float32)
        mask[chosen] = 1
        types = np.zeros(size, np.int64)
        types[cut + 1 : count] = 1
        return MaskedSample(
            tokens=tokens,
            labels=labels,
            loss_mask=mask,
            positions=np.arange(size, dtype=np.int64),
            cu_seqlens=np.array([0, count] if count == size else [0, count, size], np.int32),
            token_types=types,
            pair_label=int(rng.integers(2)),
        )


@dataclasses.dataclass(frozen=True)
class _MockSpans:
    """Random texts without some spans; sample i is a function of (seed, i).

    As many positions for the decoder as for the encoder.
    """

    num_samples: int
    seq_length: int
    vocab_size: int
    seed: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> SpanSample:
        size = self.seq_length
        rng = np.random.default_rng((self.seed, index))
        config = SpanConfig(sentinel_ids=range(2, 2 + size), bos_id=0, eos_id=1, rate=0.4)
        most = config.longest(size, size)
        text = rng.integers(2 + size, self.vocab_size, int(rng.integers(2, most + 1)))
        seen, written = corrupt_spans(text, config, rng)
        encoder, tokens, labels = np.zeros((3, size), np.int64)
        encoder[: len(seen)] = seen
        count = len(written)
        tokens[1:count], labels[:count] = written[:-1], written
        return SpanSample(
            tokens=tokens,
            labels=labels,
            loss_mask=(np.arange(size) < count).astype(np.float32),
            positions=np.arange(size, dtype=np.int64),
            cu_seqlens=np.array([0, count] if count == size else [0, count, size], np.int32),
            encoder_tokens=encoder,
            encoder_length=len(seen),
        )
