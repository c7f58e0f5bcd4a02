"""What a tokenizer is, and how one is kept in a directory."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from mcore_data.tokenizers.incremental import Decoder

CONFIG_FILE: Final = "tokenizer_config.json"
HF_FILE: Final = "tokenizer.json"
"""The file by which a folder of Hugging Face is known."""

SPECIAL_MAP: Final = "special_tokens_map.json"

_FORMAT: Final = "mcore-tokenizer"
_HF_FILES: Final = (
    HF_FILE,
    CONFIG_FILE,
    SPECIAL_MAP,
    "added_tokens.json",
    "tokenizer.model",
    "tekken.json",
    "encoder.json",
    "vocab.bpe",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_VERSION: Final = 1


Spans = list[tuple[int, int]]
"""For each token the characters of a text that it stands for: first, and one after the last."""


class Tokenizer(Protocol):
    """Turns text into ids and back.

    Special ids are None where the tokenizer has none: nobody may assume one. `eod_id` ends a
    document in a corpus, `eos_id` ends a text; often they are one. Implementations are
    picklable, since preprocessing sends them to worker processes. Those that name this class as
    their base get `encode_batch` and `decoder` from `encode` and `decode`.
    """

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows: every id lies below it."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Id that begins a text."""
        ...

    @property
    def eos_id(self) -> int | None:
        """Id that ends a text."""
        ...

    @property
    def eod_id(self) -> int | None:
        """Id that ends a document in a corpus."""
        ...

    @property
    def pad_id(self) -> int | None:
        """Id that fills up a batch."""
        ...

    @property
    def unk_id(self) -> int | None:
        """Id of what the vocabulary cannot express."""
        ...

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids with which a model expects a text to begin; `encode` leaves them to the caller."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the special tokens by their names; empty where they have none."""
        return {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, no special ids added; ValueError for lone surrogates."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; special ids give nothing, broken UTF-8 gives U+FFFD.

        ValueError for an id outside the vocabulary.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, as `encode` gives them."""
        return [self.encode(text) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[list[int], Spans]:
        """Return the ids of `text` and the characters that each stands for.

        Tokens that are bytes of one character all have its span.
        """
        ...

    def decoder(self) -> "Decoder":
        """Return what decodes ids one by one, as they come in."""
        from mcore_data.tokenizers.incremental import WindowDecoder

        return WindowDecoder(self.decode)

    def save(self, directory: str | Path) -> None:
        """Write all that `load_tokenizer` needs into `directory`, which is created."""
        ...


@dataclass(frozen=True, kw_only=True)
class VocabSizes:
    """The three sizes that are easily taken for one another.

    Attributes:
        tokenizer: ids the tokenizer can produce.
        model: rows of the embedding that mean something, those of a published model.
        padded: rows in memory, a multiple that divides over ranks; never predicted.

    """

    tokenizer: int
    model: int
    padded: int

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, *, model: int | None = None, multiple: int = 128
    ) -> "VocabSizes":
        """Return the sizes for a model of `model` rows (default: as many as ids).

        ValueError when the model has fewer rows than the tokenizer has ids.
        """
        rows = tokenizer.vocab_size if model is None else model
        if rows < tokenizer.vocab_size or multiple < 1:
            raise ValueError(
                f"model vocabulary of {rows} rows (padded to multiples of {multiple}) for "
                f"{tokenizer.vocab_size} ids; the least is {tokenizer.vocab_size}"
            )
        padded = -(-rows // multiple) * multiple
        return cls(tokenizer=tokenizer.vocab_size, model=rows, padded=padded)


def check_text(text: str) -> None:
    """Raise ValueError, with the place, when `text` has a lone surrogate (it is no Unicode)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text has the lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start} of {len(text)}"
        ) from None


def tokenizer_files(folder: str | Path) -> list[Path]:
    """Return the files that make up the tokenizer in a folder, without those below it.

    A folder of Hugging Face may hold a whole model: then these are the tokenizer's alone.
    """
    folder = Path(folder)
    found = [folder / name for name in _HF_FILES if (folder / name).is_file()]
    if found and not _is_ours(folder):
        return found
    return sorted(path for path in folder.iterdir() if path.is_file())


def _is_ours(folder: Path) -> bool:
    try:
        read_config(folder)
    except ValueError:
        return False
    return True


def write_config(directory: str | Path, kind: str, **fields: Any) -> None:
    """Write the descriptor of a tokenizer; its files must be there already."""
    config = {"format": _FORMAT, "version": _VERSION, "kind": kind, **fields}
    (Path(directory) / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def read_config(directory: Path) -> dict[str, Any]:
    """Return the descriptor; ValueError names what is wrong with the directory."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{directory}: no tokenizer, it has no {CONFIG_FILE}")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON ({error})") from None
    if not isinstance(config, dict) or config.get("format") != _FORMAT:
        raise ValueError(f'{path}: no tokenizer of ours, it lacks "format": "{_FORMAT}"')
    if config.get("version") != _VERSION:
        raise ValueError(
            f"{path}: version {config.get('version')}, this reader knows version {_VERSION}"
        )
    return config
