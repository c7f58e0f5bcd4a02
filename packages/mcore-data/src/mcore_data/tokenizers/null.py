"""Numbers as tokens: for corpora that something else has tokenised."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mcore_data.tokenizers.base import Spans, Tokenizer, write_config


@dataclass(frozen=True)
class NullTokenizer(Tokenizer):
    """Text is ids in decimal with blanks between them; the id after the last ends a document.

    Args:
        num_ids: ids that a text may hold are 0 to num_ids - 1; `num_ids` itself is EOD.

    """

    num_ids: int
    bos_id: Final[int | None] = None
    pad_id: Final[int | None] = None
    unk_id: Final[int | None] = None
    prefix_ids: Final[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        if self.num_ids < 1:
            raise ValueError(f"a null tokenizer of {self.num_ids} ids, the least is 1")

    @property
    def vocab_size(self) -> int:
        """Ids, the one that ends a document among them."""
        return self.num_ids + 1

    @property
    def eos_id(self) -> int | None:
        """The id after the last."""
        return self.num_ids

    @property
    def eod_id(self) -> int | None:
        """The id after the last."""
        return self.num_ids

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """No special token has a name."""
        return {}

    def encode(self, text: str) -> list[int]:
        """Return the numbers of `text`; ValueError, with the place, for anything else."""
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text: str) -> tuple[list[int], Spans]:
        """Return the numbers of `text` and where they stand."""
        ids, spans, end = [], [], 0
        for word in text.split():
            begin = text.index(word, end)
            end = begin + len(word)
            if not (word.isascii() and word.isdecimal()) or int(word) >= self.num_ids:
                raise ValueError(
                    f"{word[:20]!r} at character {begin} is no id from 0 to {self.num_ids - 1}"
                )
            ids.append(int(word))
            spans.append((begin, end))
        return ids, spans

    def decode(self, ids: Iterable[int]) -> str:
        """Return the ids in decimal; ValueError for an id outside 0 to num_ids."""
        values = [int(i) for i in ids]
        for i in values:
            if not 0 <= i <= self.num_ids:
                raise ValueError(f"id {i} lies outside the {self.vocab_size} of the null tokenizer")
        return " ".join(str(i) for i in values if i != self.num_ids)

    def save(self, directory: str | Path) -> None:
        """Write the descriptor, all there is."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        write_config(directory, "null", num_ids=self.num_ids)
