"""Random samples for benchmarks and parity: no file is needed, and none is read."""

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets.sample import Sample, segment_positions


class MockDataset:
    """Samples of random tokens; sample i is a function of (seed, i).

    Args:
        num_samples: how many there are.
        seq_length: tokens of a sample.
        vocab_size: ids lie below it.
        seed: of everything.
        mean_document: cut samples into documents of about so many tokens (geometrically
            distributed), isolated from each other; None: a sample is one document.

    Raises:
        ValueError: a number is below 1.

    """

    def __init__(
        self,
        num_samples: int,
        seq_length: int,
        vocab_size: int,
        seed: int,
        *,
        mean_document: float | None = None,
    ) -> None:
        least = min(num_samples, seq_length, vocab_size, mean_document or 1)
        if least < 1:
            raise ValueError(
                f"num_samples {num_samples}, seq_length {seq_length}, vocab_size {vocab_size} and "
                f"mean_document {mean_document} must be at least 1"
            )
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.seed = seed
        self.mean_document = mean_document

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        rng = np.random.default_rng((self.seed, index))
        size = self.seq_length
        text = rng.integers(0, self.vocab_size, size + 1, dtype=np.int64)
        bounds = np.array([0, size], np.int32)
        if self.mean_document is not None:
            starts = 1 + np.flatnonzero(rng.random(size - 1) < 1 / self.mean_document)
            bounds = np.concatenate([[0], starts, [size]]).astype(np.int32)
        return Sample(
            tokens=text[:-1],
            labels=text[1:],
            loss_mask=np.ones(size, np.float32),
            positions=segment_positions(bounds),
            cu_seqlens=bounds,
        )


class MockDocuments:
    """Samples of random lengths, as many short as long ones by their logarithm.

    Sample i is a function of the arguments and i.

    Args:
        num_samples: how many there are.
        max_length: most positions of a sample.
        vocab_size: ids lie below it.
        seed: of everything.

    """

    def __init__(self, num_samples: int, max_length: int, vocab_size: int, seed: int) -> None:
        if min(num_samples, max_length, vocab_size) < 1:
            raise ValueError(
                f"num_samples {num_samples}, max_length {max_length} and vocab_size {vocab_size} "
                "must be at least 1"
            )
        draws = np.random.default_rng(seed).random(num_samples)
        self.lengths: NDArray[np.int64] = np.ceil(max_length**draws).astype(np.int64)
        self.vocab_size = vocab_size
        self.seed = seed

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return MockDataset(len(self), int(self.lengths[index]), self.vocab_size, self.seed)[index]
