"""Tokenizers in the files of Hugging Face: `tokenizer.json` and what lies beside it."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

from mcore_data.tokenizers.base import (
    CONFIG_FILE,
    HF_FILE,
    SPECIAL_MAP,
    Spans,
    Tokenizer,
    check_text,
    tokenizer_files,
)

_BROKEN: Final = "\ufffd"
_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")


class HFTokenizer(Tokenizer):
    """A `tokenizer.json` behind the `Tokenizer` interface, through the `tokenizers` library.

    Ids and texts are those of transformers' tokenizers, but for three things. A special token that
    a text spells is text like any other: who writes `</s>` into a document or a message ends
    nothing. Of pieces for single bytes only those that are no UTF-8 become U+FFFD, not their whole
    run. And decoding never takes blanks out (`clean_up_tokenization_spaces`).

    Args:
        files: contents of the tokenizer's files by name: `tokenizer.json`; `tokenizer_config.json`
            or `special_tokens_map.json` for the special ids; others are kept and saved.
        where: name for error messages.

    Raises:
        ValueError: a file is missing or damaged, or a special token is not in the vocabulary.

    """

    def __init__(self, files: Mapping[str, bytes], *, where: str = "tokenizer") -> None:
        self._files = dict(files)
        self._where = where
        if HF_FILE not in self._files:
            raise ValueError(f"{where}: no tokenizer, it has no {HF_FILE}")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self._files[HF_FILE])
        except Exception as error:  # the library raises Exception itself
            raise ValueError(f"{where}/{HF_FILE}: no tokenizer ({error})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._prefix = _prefix(self._tokenizer)
        self._tokenizer.encode_special_tokens = True  # not those that a text spells
        self._falls_back = '"ByteFallback"' in json.dumps(self._object(HF_FILE)["decoder"])
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._vocab_size = max(vocabulary.values(), default=-1) + 1
        names = self._special_tokens()
        self._special = {}
        for name, text in names.items():
            if text not in vocabulary:
                raise ValueError(f"{where}: {name} {text!r} is not in the vocabulary")
            self._special[name] = vocabulary[text]

    @classmethod
    def from_folder(cls, folder: str | Path) -> "HFTokenizer":
        """Read the tokenizer's files of a folder, which may hold a model as well."""
        return cls(read_files(folder), where=str(folder))

    @property
    def vocab_size(self) -> int:
        """Ids, added tokens among them."""
        return self._vocab_size

    @property
    def bos_id(self) -> int | None:
        """Id of `bos_token`."""
        return self._special.get("bos_token")

    @property
    def eos_id(self) -> int | None:
        """Id of `eos_token`."""
        return self._special.get("eos_token")

    @property
    def eod_id(self) -> int | None:
        """Same as `eos_id`: the files know no other."""
        return self.eos_id

    @property
    def pad_id(self) -> int | None:
        """Id of `pad_token`."""
        return self._special.get("pad_token")

    @property
    def unk_id(self) -> int | None:
        """Id of `unk_token`."""
        return self._special.get("unk_token")

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the added tokens that the files call special, by their texts."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: i for i, token in sorted(added.items()) if token.special}

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids that the files put before a text, such as that of `bos_token`."""
        return self._prefix

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, nothing added; ValueError for lone surrogates."""
        check_text(text)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, in one call of the library, which may use every core."""
        for text in texts:
            check_text(text)
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [list(item.ids) for item in encoded]

    def encode_with_offsets(self, text: str) -> tuple[list[int], Spans]:
        """Return the ids of `text` and the characters that each stands for."""
        check_text(text)
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return list(encoded.ids), [(int(a), int(b)) for a, b in encoded.offsets]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; ValueError for an id outside the vocabulary."""
        values = [int(i) for i in ids]
        for i in values:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"id {i} lies outside the vocabulary of {self.vocab_size} ids")
        text = str(self._tokenizer.decode(values, skip_special_tokens=True))
        if self._falls_back and _BROKEN in text:
            return self._decode_bytes(values)
        return text

    def _decode_bytes(self, ids: Iterable[int]) -> str:
        """Decode with runs of single bytes put together here: the library breaks whole runs."""
        special = self._tokenizer.get_added_tokens_decoder()
        pieces: list[str] = []
        run = bytearray()
        for i in ids:
            piece = self._tokenizer.id_to_token(i)
            if piece is None or (i in special and special[i].special):
                continue
            if byte := _BYTE.fullmatch(piece):
                run.append(int(byte[1], 16))
                continue
            pieces += [run.decode("utf-8", "replace")] if run else []
            pieces.append(piece)
            run.clear()
        pieces += [run.decode("utf-8", "replace")] if run else []
        return str(self._tokenizer.decoder.decode(pieces))

    def save(self, directory: str | Path) -> None:
        """Write the files as they were read, so that transformers reads them too."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        for name, contents in self._files.items():
            (folder / name).write_bytes(contents)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._files, self._where)

    def _special_tokens(self) -> dict[str, str]:
        """Return the texts of bos, eos, pad and unk that the files name, by `bos_token` and so on.

        `tokenizer_config.json` counts more than `special_tokens_map.json`.
        """
        found = {}
        for file in (SPECIAL_MAP, CONFIG_FILE):
            config = self._object(file)
            for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
                token = config.get(name)
                text = token.get("content") if isinstance(token, Mapping) else token
                if isinstance(text, str):
                    found[name] = text
        return found

    def _object(self, file: str) -> dict[str, Any]:
        try:
            value = json.loads(self._files.get(file, b"{}"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self._where}/{file}: no JSON ({error})") from None
        if not isinstance(value, dict):
            raise ValueError(f"{self._where}/{file}: it holds no JSON object")
        return value


def read_files(folder: str | Path) -> dict[str, bytes]:
    """Return the contents of the tokenizer's files in a folder, by name."""
    return {path.name: path.read_bytes() for path in tokenizer_files(folder)}


def _prefix(tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return the ids that the tokenizer puts before a text of its own accord."""
    encoded = tokenizer.encode("a")
    count = 0
    while count < len(encoded.ids) and encoded.special_tokens_mask[count]:
        count += 1
    return tuple(encoded.ids[:count])


def _rebuild(files: dict[str, bytes], where: str) -> HFTokenizer:
    return HFTokenizer(files, where=where)
