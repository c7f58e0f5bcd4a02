"""Byte pairs by rank, through the library `tiktoken` (extra `tiktoken`)."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import tiktoken

from mcore_data.tokenizers.base import Spans, Tokenizer, check_text, write_config
from mcore_data.tokenizers.incremental import BytesDecoder, Decoder
from mcore_data.tokenizers.ranks import (
    SCHEMES,
    RankVocabulary,
    read_tekken,
    read_tiktoken,
    scheme_of,
)
from mcore_data.tokenizers.spans import byte_spans

RANKS_FILE: Final = "tokenizer.tiktoken"
TEKKEN_FILE: Final = "tekken.json"
_RUN: Final = 500_000
_LONG_RUN: Final = re.compile(rf"\s{{{_RUN}}}")  # the library's expressions fail from 999,000 on


class TiktokenTokenizer(Tokenizer):
    """Byte-level BPE by rank: `.tiktoken` files and tekken's, with the ids of their libraries.

    Any text comes back exactly. A special token that a text spells is text like any other. Runs of
    half a million blanks, which are too long for the library, are cut there.

    Args:
        vocabulary: what the file says.
        kind: `tiktoken` or `tekken`: how it is saved.
        file: content of the file.
        where: name for error messages.

    Raises:
        ValueError: the pattern is no regular expression that the library knows.

    """

    def __init__(
        self, vocabulary: RankVocabulary, *, kind: str, file: bytes, where: str = "tokenizer"
    ) -> None:
        self._vocabulary = vocabulary
        self._kind = kind
        self._file = file
        self._where = where
        try:
            self._encoding = tiktoken.Encoding(
                kind,
                pat_str=vocabulary.pattern,
                mergeable_ranks=dict(vocabulary.ranks),
                special_tokens={},
            )
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{where}: pattern {vocabulary.pattern!r}: {reason}") from None
        self._bytes = sorted(vocabulary.ranks, key=vocabulary.ranks.__getitem__)
        self._special_ids = set(vocabulary.special_tokens.values())
        ids = [vocabulary.first_id + len(self._bytes) - 1, *self._special_ids]
        self._vocab_size = max(ids) + 1

    @classmethod
    def from_tiktoken(
        cls,
        raw: bytes,
        *,
        pattern: str | None = None,
        special_tokens: Mapping[str, int] | None = None,
        roles: Mapping[str, str] | None = None,
        where: str = "tokenizer",
    ) -> "TiktokenTokenizer":
        """Read the content of a `.tiktoken` file.

        `pattern`: a regular expression or the name of a scheme (`gpt2`, `cl100k_base`,
        `o200k_base`), whose special tokens then count as well; by default the scheme of as many
        ranks. `roles`: special tokens by `bos_token` and so on; by default `<|endoftext|>` ends a
        text. ValueError says what does not fit.
        """
        ranks = read_tiktoken(raw, where)
        name = scheme_of(ranks, where) if pattern is None else pattern
        special = dict(special_tokens or {})
        if name in SCHEMES:
            pattern = SCHEMES[name].pattern
            special = special or dict(SCHEMES[name].special_tokens)
        default = {"eos_token": "<|endoftext|>"} if "<|endoftext|>" in special else {}
        vocabulary = RankVocabulary(
            ranks=ranks,
            pattern=str(pattern),
            special_tokens=special,
            roles=default if roles is None else dict(roles),
        )
        vocabulary.check(where)
        return cls(vocabulary, kind="tiktoken", file=raw, where=where)

    @classmethod
    def from_tekken(cls, raw: bytes, *, where: str = "tokenizer") -> "TiktokenTokenizer":
        """Read the content of a tekken file; ValueError says what is wrong with it."""
        return cls(read_tekken(raw, where), kind="tekken", file=raw, where=where)

    def _role(self, role: str) -> int | None:
        name = self._vocabulary.roles.get(role)
        return None if name is None else self._vocabulary.special_tokens[name]

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, be it a rank's or a special token's."""
        return self._vocab_size

    @property
    def bos_id(self) -> int | None:
        """Id of `bos_token`."""
        return self._role("bos_token")

    @property
    def eos_id(self) -> int | None:
        """Id of `eos_token`."""
        return self._role("eos_token")

    @property
    def eod_id(self) -> int | None:
        """Same as `eos_id`: the files know no other."""
        return self.eos_id

    @property
    def pad_id(self) -> int | None:
        """Id of `pad_token`."""
        return self._role("pad_token")

    @property
    def unk_id(self) -> int | None:
        """Id of `unk_token`, which no text gives."""
        return self._role("unk_token")

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The begin of a text in tekken's files; nothing in others."""
        return () if self._kind == "tiktoken" or self.bos_id is None else (self.bos_id,)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the special tokens by their names."""
        return dict(self._vocabulary.special_tokens)

    def _ranks(self, text: str) -> list[int]:
        check_text(text)
        if len(text) < _RUN:
            return self._encoding.encode_ordinary(text)
        return [rank for part in _parts(text) for rank in self._encoding.encode_ordinary(part)]

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; ValueError for lone surrogates."""
        first = self._vocabulary.first_id
        ranks = self._ranks(text)
        return [rank + first for rank in ranks] if first else ranks

    def encode_with_offsets(self, text: str) -> tuple[list[int], Spans]:
        """Return the ids of `text` and the characters that each stands for."""
        ranks = self._ranks(text)
        spans = byte_spans(text, (len(self._bytes[rank]) for rank in ranks))
        return [rank + self._vocabulary.first_id for rank in ranks], spans

    def _token_bytes(self, token: int) -> bytes:
        rank = token - self._vocabulary.first_id
        if 0 <= rank < len(self._bytes):
            return self._bytes[rank]
        if token in self._special_ids:
            return b""
        raise ValueError(f"id {token} lies outside the vocabulary of {self.vocab_size} ids")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; ValueError for an id that stands for nothing."""
        return b"".join(self._token_bytes(int(i)) for i in ids).decode("utf-8", "replace")

    def decoder(self) -> Decoder:
        """Return what decodes ids one by one."""
        return BytesDecoder(self._token_bytes)

    def save(self, directory: str | Path) -> None:
        """Write the file, then the descriptor."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        if self._kind == "tekken":
            (folder / TEKKEN_FILE).write_bytes(self._file)
            write_config(folder, "tekken", file=TEKKEN_FILE)
            return
        (folder / RANKS_FILE).write_bytes(self._file)
        write_config(
            folder,
            "tiktoken",
            file=RANKS_FILE,
            pattern=self._vocabulary.pattern,
            special_tokens=dict(self._vocabulary.special_tokens),
            roles=dict(self._vocabulary.roles),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._vocabulary, self._kind, self._file, self._where)


def _parts(text: str) -> Iterator[str]:
    begin = 0
    for match in _LONG_RUN.finditer(text):
        yield text[begin : match.end()]
        begin = match.end()
    yield text[begin:]


def _rebuild(vocabulary: RankVocabulary, kind: str, file: bytes, where: str) -> TiktokenTokenizer:
    return TiktokenTokenizer(vocabulary, kind=kind, file=file, where=where)
