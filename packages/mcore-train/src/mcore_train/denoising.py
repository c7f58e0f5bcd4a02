"""What is left out of texts that a model learns to restore: the part of the data's config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from mcore_train.checks import require as _require


@dataclass(frozen=True, kw_only=True)
class MaskingOptions:
    """Samples of BERT (`mcore_data.BERTDataset`): ids of special tokens, and what is masked.

    `pairs` are two segments of a text, swapped half the time ("order"), or half the time of two
    texts ("next"), or there is one ("none"). `rate` of the tokens are to be restored, up to
    `max_words` words in a row; `short_rate` of the samples are shorter than the others.
    """

    mask_id: int
    cls_id: int
    sep_id: int
    pad_id: int = 0
    pairs: Literal["order", "next", "none"] = "order"
    rate: float = 0.15
    max_words: int = 1
    short_rate: float = 0.1


@dataclass(frozen=True, kw_only=True)
class SpanOptions:
    """Samples of T5 (`mcore_data.T5Dataset`): ids of special tokens, and the spans left out.

    The encoder has `data.seq_length` positions, the decoder `target_length`. Of the ids that stand
    for spans the first is `first_sentinel`; there are `num_sentinels`, which fall from there, as
    T5's do, or rise with `rising`. The decoder begins with `bos_id`, T5's padding. `rate` of the
    tokens are left out, in spans of `mean_length` on average.
    """

    first_sentinel: int
    num_sentinels: int = 100
    rising: bool = False
    target_length: int = 114
    bos_id: int = 0
    eos_id: int = 1
    pad_id: int = 0
    rate: float = 0.15
    mean_length: float = 3.0
    short_rate: float = 0.1

    def __post_init__(self) -> None:
        _require(self.num_sentinels >= 1, f"num_sentinels={self.num_sentinels} must be at least 1")
        least = 0 if self.rising else self.num_sentinels - 1
        _require(
            self.first_sentinel >= least,
            f"first_sentinel={self.first_sentinel} and {self.num_sentinels} ids from there "
            f"{'up' if self.rising else 'down'}: use {least} or more",
        )

    @property
    def sentinels(self) -> range:
        """The ids that stand for the first span, the second, …"""
        first, count = self.first_sentinel, self.num_sentinels
        return range(first, first + count) if self.rising else range(first, first - count, -1)


class _Data(Protocol):
    """What `check_denoising` looks at of `DataConfig`."""

    @property
    def mock(self) -> bool: ...
    @property
    def masking(self) -> MaskingOptions | None: ...
    @property
    def spans(self) -> SpanOptions | None: ...


def check_denoising(family: str, data: _Data) -> None:
    """Check that the data say what the family learns to restore, and nothing of another's.

    Raises:
        ValueError: one line naming the field.
    """
    for name, owner in (("masking", "bert"), ("spans", "t5")):
        there = getattr(data, name) is not None
        _require(
            not there or family == owner,
            f"data.{name} is for models of the family {owner}, and this one is a {family}",
        )
        _require(
            there or family != owner or data.mock,
            f"a {owner} learns to restore what data.{name} leaves out: give data.{name}",
        )
