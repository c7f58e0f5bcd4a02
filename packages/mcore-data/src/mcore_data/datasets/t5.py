"""Samples for encoder-decoder models: spans of the text left out, to be written by the decoder.

Raffel et al. 2020. With <0>, <1>, ... the sentinels and spans C and E of a text A C D E:

    encoder   A <0> D <1> <eos>
    decoder   <bos> <0> C <1> E       labels   <0> C <1> E <eos>

S: positions of the encoder. T: positions of the decoder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mcore_data.datasets.sample import Sample
from mcore_data.datasets.sentences import SentenceSource
from mcore_data.indexed import IndexedReader


@dataclass(frozen=True, kw_only=True)
class SpanConfig:
    """How much is left out, and what marks it.

    Attributes:
        sentinel_ids: ids that stand for the first span, the second, ...
        bos_id: id that the decoder begins with (T5 takes its padding).
        eos_id: id that ends both texts.
        rate: share of the tokens that are left out.
        mean_length: mean length of a span in tokens.

    Raises:
        ValueError: a number out of range, or a sentinel twice.

    """

    sentinel_ids: Sequence[int]
    bos_id: int
    eos_id: int
    rate: float = 0.15
    mean_length: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1 or self.mean_length < 1:
            raise ValueError(
                f"rate {self.rate} must lie between 0 and 1 and mean_length {self.mean_length} "
                "be at least 1"
            )
        if not self.sentinel_ids or len(set(self.sentinel_ids)) < len(self.sentinel_ids):
            raise ValueError(f"sentinel_ids {list(self.sentinel_ids)} must be some, each once")

    def counts(self, num_tokens: int) -> tuple[int, int]:
        """Return how many of `num_tokens` (2 or more) are left out, and in how many spans."""
        noise = min(max(round(num_tokens * self.rate), 1), num_tokens - 1)
        spans = max(round(noise / self.mean_length), 1)
        return noise, min(spans, noise, num_tokens - noise)

    def sizes(self, num_tokens: int) -> tuple[int, int]:
        """Return the positions that a text takes in the encoder and in the decoder."""
        noise, spans = self.counts(num_tokens)
        return num_tokens - noise + spans + 1, noise + spans + 1

    def longest(self, encoder: int, decoder: int) -> int:
        """Return the most tokens of a text for S and T positions; ValueError when it is below 2."""
        size = 1
        while True:
            s, t = self.sizes(size + 1)
            spans = self.counts(size + 1)[1]
            if s > encoder or t > decoder or spans > len(self.sentinel_ids):
                break
            size += 1
        if size < 2:
            raise ValueError(
                f"{encoder} positions of the encoder and {decoder} of the decoder hold no text of "
                "2 tokens: it takes 3 and 3"
            )
        return size


def corrupt_spans(
    text: NDArray[np.int64], config: SpanConfig, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return what the encoder sees of `text` [n >= 2] and what the decoder is to write.

    Text and spans left out take turns, text first; their lengths are random, their sums and
    numbers are not.
    """
    noise, spans = config.counts(len(text))
    kept = _parts(len(text) - noise, spans, rng)
    left_out = _parts(noise, spans, rng)
    bounds = np.cumsum(np.stack([kept, left_out], axis=1).ravel())[:-1]
    pieces = np.split(text, bounds)
    marks = [[sentinel] for sentinel in config.sentinel_ids[:spans]]
    seen = [part for pair in zip(pieces[::2], marks, strict=True) for part in pair]
    written = [part for pair in zip(marks, pieces[1::2], strict=True) for part in pair]
    end = [config.eos_id]
    return np.concatenate([*seen, end]), np.concatenate([*written, end])


def _parts(total: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Cut `total` into `count` parts of at least 1; every way is as likely."""
    cuts = np.sort(rng.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


@dataclass(frozen=True, kw_only=True, eq=False)
class SpanSample(Sample):
    """A sample of an encoder-decoder model; the fields of `Sample` are the decoder's.

    Attributes:
        encoder_tokens: what the encoder sees, int64 [S], padded.
        encoder_length: how many of them are no padding.

    """

    encoder_tokens: NDArray[np.int64]
    encoder_length: int

    def extra(self) -> Mapping[str, NDArray[Any]]:
        """Return `encoder_tokens` [S] and `encoder_length`, a scalar."""
        return {
            "encoder_tokens": self.encoder_tokens,
            "encoder_length": np.array(self.encoder_length),
        }


class T5Dataset:
    """Samples for encoder-decoder models from a file with a sequence for every sentence.

    Sample i is a function of the seed and i; order and epochs are those of `BERTDataset`. Texts are
    as long as fills the encoder, or the decoder where that is full earlier.

    Args:
        reader: the tokens.
        documents: document numbers to use (default: all).
        seq_length: positions of the encoder.
        target_length: positions of the decoder.
        spans: how much is left out, and what marks it.
        num_samples: how many samples are needed; None: one epoch.
        seed: seed of everything that is random.
        pad_id: id of padding.
        short_rate: share of samples with a shorter target.
        cache_dir: keep the stretches of sentences here.

    Raises:
        ValueError: no document gives a sample, or the lengths hold no text.

    """

    def __init__(
        self,
        reader: IndexedReader,
        documents: range | ArrayLike | None = None,
        *,
        seq_length: int,
        target_length: int,
        spans: SpanConfig,
        num_samples: int | None = None,
        seed: int = 1234,
        pad_id: int = 0,
        short_rate: float = 0.1,
        cache_dir: str | Path | None = None,
    ) -> None:
        self.seq_length = seq_length
        self.target_length = target_length
        self.spans = spans
        self.seed = seed
        self.pad_id = pad_id
        self.source = SentenceSource(
            reader,
            documents,
            max_tokens=spans.longest(seq_length, target_length),
            least_sentences=1,
            num_samples=num_samples,
            seed=seed,
            short_rate=short_rate,
            cache_dir=cache_dir,
        )

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> SpanSample:
        first, stop, most = self.source.stretch(index)
        rng = np.random.default_rng((self.seed, index, 1))
        seen, written = corrupt_spans(self.source.text(first, stop)[:most], self.spans, rng)
        count, size = len(written), self.target_length
        encoder = np.full(self.seq_length, self.pad_id, np.int64)
        encoder[: len(seen)] = seen
        tokens, labels = np.full((2, size), self.pad_id, np.int64)
        tokens[:count] = np.concatenate([[self.spans.bos_id], written[:-1]])
        labels[:count] = written
        return SpanSample(
            tokens=tokens,
            labels=labels,
            loss_mask=(np.arange(size) < count).astype(np.float32),
            positions=np.arange(size, dtype=np.int64),
            cu_seqlens=np.array([0, count] if count == size else [0, count, size], np.int32),
            encoder_tokens=encoder,
            encoder_length=len(seen),
        )
