"""Which samples a run learns from, and how many at a time."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from mcore_data import BatchRamp, BatchSteps
from mcore_train.checks import require as _require
from mcore_train.denoising import MaskingOptions, SpanOptions

LastBatch = Literal["join", "drop", "pad"]

_ADDRESS: Final = re.compile(r"([a-z][a-z0-9+.-]+):/")  # a path has lost the second stroke


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the tokens come from.

    `train` is a prefix of `.bin/.idx` files, `blend` several: `A B`, each in proportion to its
    samples, or weights and files in turn, `0.3 A 0.7 B`. `validation` is another prefix, or None:
    then `split` (default 969,30,1) divides the documents of the training files. In their stead
    `parts` is a JSON file with a blend for each part and validation sets by name (see
    `mcore_data.Corpus.read`). `weights` is a JSON file of weights by the samples consumed
    (`mcore_data.WeightSchedule.read`). Weights may change from one run to the next: each file goes
    on where it stands. `each_validation` makes every validation file a set of its own.

    `tokenizer` is a folder written by `mcore-data train-tokenizer`, or anything else that
    `mcore_data.load_tokenizer` reads; it travels into the checkpoints. `mock` makes random tokens
    instead. The four options on documents are those of `mcore_data.GPTDataset`. `masking` and
    `spans` say what a BERT and a T5 learn to restore, of files with a sequence for every sentence.
    """

    train: Path | None = None
    blend: tuple[str, ...] | None = None
    parts: Path | None = None
    weights: Path | None = None
    validation: Path | None = None
    each_validation: bool = False
    split: str | None = None
    tokenizer: Path | None = None
    seq_length: int = 256
    eod_id: int | None = None
    reset_positions: bool = False
    reset_attention: bool = False
    mask_eod_loss: bool = False
    mask_after_eod: bool = False
    cache: Path | None = None
    mock: bool = False
    masking: MaskingOptions | None = None
    spans: SpanOptions | None = None

    def __post_init__(self) -> None:
        _require(self.seq_length >= 1, f"seq_length={self.seq_length} must be at least 1")
        options = ("reset_positions", "reset_attention", "mask_eod_loss", "mask_after_eod")
        asked = [name for name in options if getattr(self, name)]
        for name in ("train", "validation", "split", "cache", *asked) if self.mock else ():
            value = getattr(self, name)
            _require(
                value is None,
                f"data.mock makes random tokens, so data.{name}={value} would not be read",
            )
        self._check_files()
        _require(
            not asked or self.eod_id is not None or self.tokenizer is not None,
            f"{', '.join(asked)}: to know where documents end they need eod_id or a tokenizer",
        )

    def _check_files(self) -> None:
        kinds = ("train", "blend", "parts", "mock")
        given = [f"data.{name}" for name in kinds if getattr(self, name)]
        _require(len(given) < 2, f"{' and '.join(given)}: each says what to train on, give one")
        _require(
            self.parts is None or self.validation is None,
            f"data.validation={self.validation} would not be read: data.parts={self.parts} names "
            "the validation files",
        )
        for name, value in (("validation", self.validation), ("parts", self.parts)):
            _require(
                value is None or self.split is None,
                f"data.split={self.split} would not be read: data.{name}={value} names the "
                "validation files",
            )
        for name in ("train", "validation"):
            value = getattr(self, name)
            _require(
                _ADDRESS.match(str(value)) is None,
                f"data.{name}={value} is no path: addresses such as s3://bucket/corpus stand in "
                "data.blend or data.parts",
            )
        several = self.blend is not None or self.parts is not None
        _require(
            self.weights is None or several,
            f"data.weights={self.weights} is for the files of data.blend or data.parts",
        )
        _require(
            not self.each_validation or (several and self.validation is None),
            "data.each_validation is for validation files of data.parts, or cut from data.blend",
        )


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Samples per optimizer step (over all replicas) and per forward pass of one replica.

    `ramp` lets the step grow to `global_size` evenly over the samples consumed, `sizes` at given
    numbers of them (`mcore_data.BatchRamp`, `mcore_data.BatchSteps`); the learning rate stays a
    function of the step. `last` says what becomes of the end of an epoch that does not fill a
    batch: `join` goes on into the next epoch, `drop` leaves it out, `pad` fills up with rows
    without loss. Files of a blend have epochs of their own, and always join.
    """

    global_size: int = 4
    micro_size: int = 4
    ramp: BatchRamp | None = None
    sizes: BatchSteps | None = None
    last: LastBatch = "join"

    def __post_init__(self) -> None:
        for name in ("global_size", "micro_size"):
            _require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        _require(
            self.ramp is None or self.sizes is None,
            "batch.ramp and batch.sizes: each says how the batch grows, give one",
        )
        self.possible_sizes()

    @property
    def growth(self) -> BatchRamp | BatchSteps | None:
        """How the batch comes to its final size; None: it has that from the start."""
        return self.sizes if self.ramp is None else self.ramp

    def possible_sizes(self) -> Sequence[int]:
        """The sizes that a batch may have; ValueError when the growth does not end there."""
        growth = self.growth
        return [self.global_size] if growth is None else growth.sizes(self.global_size)

    def samples(self, steps: int) -> int:
        """The samples that so many steps of a run take."""
        growth, taken = self.growth, 0
        if growth is None:
            return steps * self.global_size
        for _ in range(steps):
            taken += growth.size(taken, self.global_size)
        return taken
