"""Bytes as tokens: no vocabulary to train, any text exactly."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mcore_data.tokenizers.base import check_text, write_config

_BYTES: Final = 256


@dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; 256 ends a document or text."""

    vocab_size: Final[int] = _BYTES + 1
    bos_id: Final[int | None] = None
    eos_id: Final[int | None] = _BYTES
    eod_id: Final[int | None] = _BYTES
    pad_id: Final[int | None] = None
    unk_id: Final[int | None] = None
    prefix_ids: Final[tuple[int, ...]] = ()

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`; ValueError for lone surrogates."""
        check_text(text)
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; ValueError for an id outside 0 to 256."""
        values = [int(i) for i in ids]
        for i in values:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"id {i} lies outside the {self.vocab_size} of the byte tokenizer")
        return bytes(i for i in values if i < _BYTES).decode("utf-8", "replace")

    def save(self, directory: str | Path) -> None:
        """Write the descriptor, all there is."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        write_config(directory, "byte")
