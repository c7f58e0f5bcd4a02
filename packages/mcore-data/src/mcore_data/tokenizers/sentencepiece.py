"""SentencePiece models."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import sentencepiece

from mcore_data.tokenizers.base import Spans, Tokenizer, check_text, write_config

MODEL_FILE: Final = "tokenizer.model"
_SPACE: Final = "\u2581"  # how a model writes a blank; a text may hold the sign itself


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model behind the `Tokenizer` interface.

    Args:
        model: serialised model (the content of a `.model` file).
        exact: the model neither normalises nor adds blanks and falls back to bytes (as those of
            `train_sentencepiece`): then `decode(encode(text)) == text` for every text. False
            gives the ids of the original library, whatever the model does.
        where: name for error messages.

    """

    def __init__(self, model: bytes, *, exact: bool = False, where: str = "model") -> None:
        self._model = model
        self._exact = exact
        if not model:  # which the library takes for one without a piece
            raise ValueError(f"{where}: no SentencePiece model (0 bytes)")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError(f"{where}: no SentencePiece model ({error})") from None
        names = [f"<0x{byte:02X}>" for byte in _SPACE.encode()]
        self._space_ids: list[int] = [self._processor.piece_to_id(name) for name in names]
        if exact and self._processor.unk_id() in self._space_ids:
            raise ValueError(f"{where}: not exact, the model has no pieces for single bytes")

    @classmethod
    def from_file(cls, path: str | Path, *, exact: bool = False) -> "SentencePieceTokenizer":
        """Read a `.model` file."""
        return cls(Path(path).read_bytes(), exact=exact, where=str(path))

    @property
    def vocab_size(self) -> int:
        """Number of pieces."""
        return int(self._processor.vocab_size())

    def _special(self, value: int) -> int | None:
        return None if value < 0 else int(value)

    @property
    def bos_id(self) -> int | None:
        """Id of the begin-of-sentence piece."""
        return self._special(self._processor.bos_id())

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-sentence piece."""
        return self._special(self._processor.eos_id())

    @property
    def eod_id(self) -> int | None:
        """Same as `eos_id`: such models have no piece of its own for it."""
        return self.eos_id

    @property
    def pad_id(self) -> int | None:
        """Id of the padding piece."""
        return self._special(self._processor.pad_id())

    @property
    def unk_id(self) -> int | None:
        """Id of the unknown piece."""
        return self._special(self._processor.unk_id())

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """None: what such a model's texts begin with its file does not say."""
        return ()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; ValueError for lone surrogates."""
        check_text(text)
        if not self._exact or _SPACE not in text:
            return list(self._processor.encode(text))
        # The model would read this sign as a blank: spell it in bytes.
        ids: list[int] = []
        for i, part in enumerate(text.split(_SPACE)):
            ids += self._space_ids if i else []
            ids += self._processor.encode(part)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, in one call of the library where it reads them as they are.

        In the calling thread alone.
        """
        if self._exact and any(_SPACE in text for text in texts):
            return [self.encode(text) for text in texts]
        for text in texts:
            check_text(text)
        return [list(ids) for ids in self._processor.encode(list(texts), num_threads=1)]

    def encode_with_offsets(self, text: str) -> tuple[list[int], Spans]:
        """Return the ids of `text` and the characters that each stands for."""
        check_text(text)
        if not self._exact or _SPACE not in text:
            return self._with_offsets(text, 0)
        ids: list[int] = []
        spans: Spans = []
        begin = 0
        for i, part in enumerate(text.split(_SPACE)):
            if i:
                ids += self._space_ids
                spans += [(begin - 1, begin)] * len(self._space_ids)
            more, where = self._with_offsets(part, begin)
            ids += more
            spans += where
            begin += len(part) + 1
        return ids, spans

    def _with_offsets(self, text: str, begin: int) -> tuple[list[int], Spans]:
        found = self._processor.encode(text, out_type="offset_mapping")
        ids, spans = list(found["ids"]), list(found["offsets"])
        # The library gives a character's span to the last of its bytes alone.
        for i in range(len(ids) - 2, -1, -1):
            if spans[i][0] == spans[i][1] == spans[i + 1][0] and self._processor.is_byte(ids[i]):
                spans[i] = spans[i + 1]
        return ids, [(begin + first, begin + last) for first, last in spans]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; ValueError for an id outside the vocabulary."""
        values = [int(i) for i in ids]
        for i in values:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"id {i} lies outside the vocabulary of {self.vocab_size} pieces")
        return str(self._processor.decode(values))

    def save(self, directory: str | Path) -> None:
        """Write the model, then the descriptor."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MODEL_FILE).write_bytes(self._model)
        write_config(folder, "sentencepiece", file=MODEL_FILE, exact=self._exact)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._model, self._exact)


def _rebuild(model: bytes, exact: bool) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(model, exact=exact)
