"""Stretches of whole sentences, the raw material of BERT's and T5's samples.

The files hold a sequence for every sentence, and documents of sentences. A document is cut into
stretches of consecutive sentences, each as long as a target: most have the full length, some a
random shorter one, so that a model sees short texts too. The rule is that of Megatron-LM's BERT
samples, its random numbers are not.

N: stretches.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mcore_data.datasets.cache import cached_arrays, content_key
from mcore_data.datasets.gpt_index import as_numbers
from mcore_data.indexed import IndexedReader
from mcore_data.sampler import shuffled_order

_INDEX_VERSION: Final = 1
_DOCUMENTS: Final = 1 << 16  # documents that are cut at a time
_SHORTEST: Final = 2  # tokens of a stretch


def sentence_stretches(
    lengths: NDArray[np.integer[Any]],
    bounds: NDArray[np.integer[Any]],
    *,
    max_tokens: int,
    least_sentences: int,
    short_rate: float,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Cut documents into stretches, [N, 3]: first sentence, the one behind the last, most tokens.

    A stretch ends with the sentence that reaches its target; what is left of a document joins it
    when it has fewer than `least_sentences`. Documents of fewer are left out.

    Args:
        lengths: tokens of every sentence [*].
        bounds: sentences before each document, and before the end of the last [D + 1].
        max_tokens: target of most stretches.
        least_sentences: fewest sentences of a stretch.
        short_rate: share of stretches with a target drawn from 2 to `max_tokens`.
        rng: draws the targets.

    """
    count = len(lengths)
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ends = np.repeat(bounds[1:], np.diff(bounds))
    place = np.arange(count)
    draws = rng.random((count, 2))
    short = _SHORTEST + (draws[:, 1] * (max_tokens - _SHORTEST + 1)).astype(np.int64)
    targets = np.where(draws[:, 0] < short_rate, short, max_tokens)
    # Where a stretch would end if it began at each sentence: then only a chain is to be followed.
    stops = np.searchsorted(before, before[:-1] + targets, side="left")
    stops = np.minimum(np.maximum(stops, place + least_sentences), ends)
    stops = np.where(ends - stops < least_sentences, ends, stops)
    following, firsts, at = stops.tolist(), [], 0
    while at < count:
        firsts.append(at)
        at = following[at]
    first = np.array(firsts, np.int64)
    stop = stops[first]
    keep = (stop - first >= least_sentences) & (before[stop] - before[first] >= _SHORTEST)
    rows: NDArray[np.int64] = np.stack([first, stop, targets[first]], axis=1)[keep]
    return rows


class SentenceSource:
    """Stretches of the documents of a file, epoch after epoch, shuffled.

    Every epoch cuts the documents anew and shows the stretches in another order; the order is a
    function of the lengths and the arguments alone.

    Args:
        reader: the tokens, one sequence a sentence.
        documents: document numbers to use (default: all).
        max_tokens: most tokens of a stretch.
        least_sentences: fewest sentences of a stretch.
        num_samples: least number of stretches, by as many epochs as it takes; None: one epoch.
        seed: seed of targets and order.
        short_rate: share of stretches with a shorter target.
        cache_dir: keep the stretches here, by the hash of what they depend on.

    Raises:
        ValueError: no document has a stretch, or a number lies out of range.

    """

    def __init__(
        self,
        reader: IndexedReader,
        documents: range | ArrayLike | None = None,
        *,
        max_tokens: int,
        least_sentences: int,
        num_samples: int | None = None,
        seed: int = 1234,
        short_rate: float = 0.1,
        cache_dir: str | Path | None = None,
    ) -> None:
        if max_tokens < _SHORTEST:
            raise ValueError(f"{max_tokens} tokens for text in a sample, the least is {_SHORTEST}")
        if not 0 <= short_rate <= 1:
            raise ValueError(f"short_rate is {short_rate}, it must lie in 0 to 1")
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}, the least is 1")
        count = reader.num_documents
        chosen = as_numbers(range(count) if documents is None else documents, np.int64)
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= count):
            raise ValueError(
                f"{reader.prefix}: documents {chosen.min()} to {chosen.max()} asked for, it has "
                f"{count}"
            )
        self.reader = reader
        self.seed = seed
        self._documents = chosen
        self._max_tokens = max_tokens
        self._least = least_sentences
        self._short_rate = short_rate
        self._cache_dir = cache_dir
        self.epochs = [self._epoch(0)]
        while num_samples is not None and len(self) < num_samples:
            self.epochs.append(self._epoch(len(self.epochs)))

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return the stretches of an epoch in the order of the file, with sentences of the file."""
        if self._cache_dir is None:
            return self._cut(epoch)
        parameters = {
            "kind": "sentences",
            "version": _INDEX_VERSION,
            "seed": self.seed,
            "epoch": epoch,
            "max_tokens": self._max_tokens,
            "least_sentences": self._least,
            "short_rate": self._short_rate,
        }
        bounds = self.reader.document_indices
        key = content_key(parameters, self._documents, bounds, self.reader.lengths)
        folder, build = Path(self._cache_dir), lambda: {"rows": self._cut(epoch)}
        return cached_arrays(folder, key, build, ("rows",))["rows"]

    def _cut(self, epoch: int) -> NDArray[np.int64]:
        rng = np.random.default_rng((self.seed, epoch))
        sentences = self.reader.document_indices
        parts = []
        for start in range(0, len(self._documents), _DOCUMENTS):
            chosen = self._documents[start : start + _DOCUMENTS]
            first, counts = sentences[chosen], np.diff(sentences)[chosen]
            bounds = np.concatenate([[0], np.cumsum(counts)])
            here = np.arange(bounds[-1]) + np.repeat(first - bounds[:-1], counts)
            found = sentence_stretches(
                self.reader.lengths[here],
                bounds,
                max_tokens=self._max_tokens,
                least_sentences=self._least,
                short_rate=self._short_rate,
                rng=rng,
            )
            found[:, 1] = here[found[:, 1] - 1] + 1
            found[:, 0] = here[found[:, 0]]
            parts.append(found)
        if not sum(map(len, parts)):
            raise ValueError(
                f"{self.reader.prefix}: none of {len(self._documents)} documents holds "
                f"{self._least} sentences with {_SHORTEST} tokens; a sequence "
                "of the file must be a sentence"
            )
        return np.concatenate(parts)

    def __len__(self) -> int:
        return sum(map(len, self.epochs))

    def stretch(self, index: int) -> tuple[int, int, int]:
        """Return first sentence, the one behind the last and most tokens of sample `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.reader.prefix}: sample {index} of {len(self)}")
        epoch = 0
        while index >= len(self.epochs[epoch]):
            index -= len(self.epochs[epoch])
            epoch += 1
        rows = self.epochs[epoch]
        place = shuffled_order([index], num_samples=len(rows), seed=self.seed, epoch=epoch)
        first, stop, most = (int(value) for value in rows[place[0]])
        return first, stop, most

    def text(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the tokens of sentences `first` to `stop` - 1, int64."""
        parts = [self.reader.get(i) for i in range(first, stop)]
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)

    def document_of(self, sentence: int) -> int:
        """Return the document that holds a sentence."""
        bounds = self.reader.document_indices
        return int(np.searchsorted(bounds, sentence, side="right")) - 1
