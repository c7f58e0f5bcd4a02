"""Samples for masked language models: pairs of segments, some of whose words are to be restored.

Devlin et al. 2019 (masking, the next segment), Lan et al. 2020 (the order of segments), Joshi et
al. 2020 (several words in a row). The text of a sample is

    <cls> A <sep> B <sep>        or        <cls> A <sep>

S: positions of a sample. V: vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mcore_data.datasets.sample import Sample
from mcore_data.datasets.sentences import SentenceSource
from mcore_data.indexed import IndexedReader

Pairs = Literal["order", "next", "none"]
_MASKED, _RANDOM = 0.8, 0.1  # shares of the chosen tokens; the others stay as they are


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskingConfig:
    """What is masked, and with what.

    Attributes:
        mask_id, cls_id, sep_id: ids of the special tokens.
        vocab_size: ids that may stand for a token at random are below it.
        continues: which ids go on a word, bool [V] (WordPiece's `##`); they are masked with its
            beginning. None: every token is a word.
        rate: share of the tokens that are chosen.
        max_words: most words in a row that are chosen together; n of them with probability
            proportional to 1 / n.

    Raises:
        ValueError: a rate outside 0 to 1, an id outside the vocabulary, or the wrong length.

    """

    mask_id: int
    cls_id: int
    sep_id: int
    vocab_size: int
    continues: NDArray[np.bool_] | None = None
    rate: float = 0.15
    max_words: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(f"masking rate is {self.rate}, it must lie between 0 and 1")
        if self.max_words < 1:
            raise ValueError(f"max_words is {self.max_words}, the least is 1")
        for name in ("mask_id", "cls_id", "sep_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ValueError(
                    f"{name} {getattr(self, name)} lies outside the vocabulary of {self.vocab_size}"
                )
        if self.continues is not None and len(self.continues) != self.vocab_size:
            raise ValueError(
                f"continues has {len(self.continues)} entries, the vocabulary {self.vocab_size}"
            )


def choose_words(
    text: NDArray[np.int64], config: MaskingConfig, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return which places of `text` [n] are to be restored, int64 [*], rising; whole words only.

    As many tokens as the rate says, or fewer where no other word fits; one word at least. Special
    tokens are never chosen.
    """
    special = (text == config.cls_id) | (text == config.sep_id)
    places = np.flatnonzero(~special)
    if not len(places):
        return places
    starts = np.ones(len(places), bool)
    if config.continues is not None:
        # A word does not go on behind a special token, whatever its next token looks like.
        starts = ~config.continues[text[places]] | (np.diff(places, prepend=-2) > 1)
    bounds = np.append(np.flatnonzero(starts), len(places))
    sizes = np.diff(bounds)
    wanted = max(1, round(len(text) * config.rate))
    odds = 1 / np.arange(1, config.max_words + 1)
    runs = rng.choice(config.max_words, len(sizes), p=odds / odds.sum()) + 1
    taken, total = np.zeros(len(sizes), bool), 0
    for word, run in zip(rng.permutation(len(sizes)).tolist(), runs.tolist(), strict=True):
        for count in range(run, 0, -1):
            part = slice(word, word + count)
            size = int(sizes[part].sum())
            if total + size <= wanted and not taken[part].any():
                taken[part], total = True, total + size
                break
        if total == wanted:
            break
    if not total:
        taken[int(sizes.argmin())] = True
    chosen: NDArray[np.int64] = places[np.repeat(taken, sizes)]
    return chosen


def mask_tokens(
    text: NDArray[np.int64],
    chosen: NDArray[np.int64],
    config: MaskingConfig,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Return `text` with 8 of 10 `chosen` places masked, 1 of 10 random and 1 of 10 as it was."""
    draw = rng.random(len(chosen))
    random = rng.integers(0, config.vocab_size, len(chosen))
    shown = np.where(draw < _MASKED, config.mask_id, text[chosen])
    shown = np.where((draw >= _MASKED) & (draw < _MASKED + _RANDOM), random, shown)
    masked = text.copy()
    masked[chosen] = shown
    return masked


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedSample(Sample):
    """A sample of a masked language model.

    Tokens attend to each other in both directions; padding is a segment of its own. Labels are the
    ids before masking, of which those with loss are to be restored.

    Attributes:
        token_types: 0 for <cls> A <sep>, 1 for B <sep>, int64 [S]; padding is 0.
        pair_label: 1 where B does not follow A (they are swapped, or B comes from elsewhere), 0
            where it does, -1 without pairs.

    """

    token_types: NDArray[np.int64]
    pair_label: int

    def extra(self) -> Mapping[str, NDArray[Any]]:
        """Return `token_types` [S] and `pair_label`, a scalar."""
        return {"token_types": self.token_types, "pair_label": np.array(self.pair_label)}


class BERTDataset:
    """Samples for masked language models from a file with a sequence for every sentence.

    Sample i is a function of the seed and i. `len(dataset)` may exceed `num_samples`: the last
    epoch is finished. Samples are shuffled, and cut and masked anew in every epoch.

    Args:
        reader: the tokens.
        documents: document numbers to use (default: all).
        seq_length: positions of a sample.
        masking: what is masked, and with what.
        pairs: `order`: two segments of one document, swapped half the time. `next`: half the time
            the second comes from another document. `none`: one segment.
        num_samples: how many samples are needed; None: one epoch.
        seed: seed of everything that is random.
        pad_id: id of padding.
        short_rate: share of samples with a shorter target.
        cache_dir: keep the stretches of sentences here.

    Raises:
        ValueError: no document gives a sample, `seq_length` is too short for one, or pairs with
            another document are asked for where there is only one.

    """

    def __init__(
        self,
        reader: IndexedReader,
        documents: range | ArrayLike | None = None,
        *,
        seq_length: int,
        masking: MaskingConfig,
        pairs: Pairs = "order",
        num_samples: int | None = None,
        seed: int = 1234,
        pad_id: int = 0,
        short_rate: float = 0.1,
        cache_dir: str | Path | None = None,
    ) -> None:
        if pairs not in ("order", "next", "none"):
            raise ValueError(f"pairs is {pairs!r}, it can be order, next or none")
        special = 2 if pairs == "none" else 3
        if seq_length < special + 2:
            raise ValueError(
                f"seq_length {seq_length} with {special} special tokens: use {special + 2} or more"
            )
        self.seq_length = seq_length
        self.masking = masking
        self.pairs = pairs
        self.pad_id = pad_id
        self.seed = seed
        self.source = SentenceSource(
            reader,
            documents,
            max_tokens=seq_length - special,
            least_sentences=1 if pairs == "none" else 2,
            num_samples=num_samples,
            seed=seed,
            short_rate=short_rate,
            cache_dir=cache_dir,
        )
        first = self.source.epochs[0][:, 0]
        owners = {self.source.document_of(int(first[0])), self.source.document_of(int(first[-1]))}
        if pairs == "next" and len(owners) < 2:
            raise ValueError(f"{reader.prefix}: pairs='next' takes samples of two documents")

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> MaskedSample:
        first, stop, most = self.source.stretch(index)
        rng = np.random.default_rng((self.seed, index, 1))
        label = -1
        if self.pairs == "none":
            parts = [self.source.text(first, stop)[:most]]
        else:
            cut = int(rng.integers(first + 1, stop))
            a, b = self.source.text(first, cut), self.source.text(cut, stop)
            label = int(rng.random() < 0.5)
            if label and self.pairs == "order":
                a, b = b, a
            elif label:
                b = self._elsewhere(first, rng)
            parts = list(_trimmed(a, b, most, rng))
        return self._sample(parts, label, rng)

    def _elsewhere(self, sentence: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return the end of a stretch of another document than that of `sentence`."""
        rows = self.source.epochs[0]
        document = self.source.document_of(sentence)
        while True:
            first, stop, _ = (int(value) for value in rows[rng.integers(len(rows))])
            if self.source.document_of(first) != document:
                return self.source.text(int(rng.integers(first + 1, stop)), stop)

    def _sample(
        self, parts: list[NDArray[np.int64]], label: int, rng: np.random.Generator
    ) -> MaskedSample:
        size, sep = self.seq_length, [self.masking.sep_id]
        text = np.array([self.masking.cls_id], np.int64)
        types: NDArray[np.int64] = np.zeros(size, np.int64)
        for number, part in enumerate(parts):
            begin = len(text) if number else 0
            text = np.concatenate([text, part, sep])
            types[begin : len(text)] = number
        count = len(text)
        chosen = choose_words(text, self.masking, rng)
        tokens, labels = np.full((2, size), self.pad_id, np.int64)
        tokens[:count] = mask_tokens(text, chosen, self.masking, rng)
        labels[:count] = text
        loss_mask = np.zeros(size, np.float32)
        loss_mask[chosen] = 1
        return MaskedSample(
            tokens=tokens,
            labels=labels,
            loss_mask=loss_mask,
            positions=np.arange(size, dtype=np.int64),
            cu_seqlens=np.array([0, count] if count == size else [0, count, size], np.int32),
            token_types=types,
            pair_label=label,
        )


def _trimmed(
    a: NDArray[np.int64], b: NDArray[np.int64], most: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Take single tokens from both ends of the longer until both have `most` together."""
    excess = max(len(a) + len(b) - most, 0)
    # Taken from the longer alone until both are equal, then from both in turn.
    longer = min(excess, abs(len(a) - len(b)))
    rest = excess - longer
    from_a = (longer if len(a) > len(b) else 0) + rest // 2
    kept = []
    for part, loss in ((a, from_a), (b, excess - from_a)):
        front = int(rng.binomial(loss, 0.5))
        kept.append(part[front : len(part) - (loss - front)])
    return kept[0], kept[1]
