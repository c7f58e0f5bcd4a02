"""Bytes as tokens: no vocabulary to train, any text exactly."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mcore_data.tokenizers.base import Spans, Tokenizer, check_text, write_config
from mcore_data.tokenizers.incremental import BytesDecoder, Decoder
from mcore_data.tokenizers.spans import byte_spans

_BYTES: Final = 256


@dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
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

    def encode_with_offsets(self, text: str) -> tuple[list[int], Spans]:
        """Return the bytes of `text` and the character that each belongs to."""
        ids = self.encode(text)
        return ids, byte_spans(text, [1] * len(ids))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; ValueError for an id outside 0 to 256."""
        values = [int(i) for i in ids]
        for i in values:
            self._check(i)
        return bytes(i for i in values if i < _BYTES).decode("utf-8", "replace")

    def decoder(self) -> Decoder:
        """Return what decodes ids one by one."""
        return BytesDecoder(self._token_bytes)

    def _token_bytes(self, token: int) -> bytes:
        self._check(token)
        return bytes([token]) if token < _BYTES else b""

    def _check(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"id {token} lies outside the {self.vocab_size} of the byte tokenizer")

    def save(self, directory: str | Path) -> None:
        """Write the descriptor, all there is."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        write_config(directory, "byte")
