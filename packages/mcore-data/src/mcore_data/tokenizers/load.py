"""Open a tokenizer by name, file or directory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mcore_data.tokenizers import legacy
from mcore_data.tokenizers.base import CONFIG_FILE, HF_FILE, SPECIAL_MAP, Tokenizer, read_config
from mcore_data.tokenizers.byte import ByteTokenizer
from mcore_data.tokenizers.null import NullTokenizer

if TYPE_CHECKING:
    from mcore_data.tokenizers.hf import HFTokenizer
    from mcore_data.tokenizers.tiktoken import TiktokenTokenizer

_TEKKEN: Final = "tekken"
_RANKS: Final = ".tiktoken"
_MODEL_FILE: Final = "tokenizer.model"
_MODEL: Final = ".model"
_READ: Final = {
    CONFIG_FILE,
    SPECIAL_MAP,
    legacy.WORDPIECE_FILE,
    *(name for pair in legacy.GPT2_FILES for name in pair),
}


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Return the tokenizer that `source` names.

    `source` is one of: `byte`; `null:N`, which reads numbers below N; a directory that `save`
    wrote; a folder with `tokenizer.json`, with `tekken.json`, with `encoder.json` and `vocab.bpe`
    (or `vocab.json` and `merges.txt`), with `vocab.txt` of word pieces or with a SentencePiece
    `tokenizer.model`; a file `.model`, `.tiktoken` or `tekken*.json`. Nothing is fetched from
    anywhere. ValueError says what is missing or unknown.
    """
    path = Path(source)
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return _from_file(path)
    name, colon, count = str(source).partition(":")
    if str(source) == "byte":
        return ByteTokenizer()
    if name == "null" and colon:
        if not count.isdecimal():
            raise ValueError(f"{source}: null:N takes a number of ids, such as null:50000")
        return NullTokenizer(int(count))
    raise ValueError(
        f"{source}: no tokenizer; give a directory with {CONFIG_FILE} or {HF_FILE}, a file .model, "
        f"{_RANKS} or {_TEKKEN}*.json, byte, or null:N"
    )


def _from_file(path: Path) -> Tokenizer:
    if _MODEL in path.suffixes:  # also tokenizer.model.v3
        return _sentencepiece(path, exact=False)
    if path.suffix == _RANKS:
        return _tiktoken(path).from_tiktoken(path.read_bytes(), where=str(path))
    if path.suffix == ".json" and path.name.startswith(_TEKKEN):
        return _tiktoken(path).from_tekken(path.read_bytes(), where=str(path))
    raise ValueError(
        f"{path}: no tokenizer; files .model, {_RANKS} and {_TEKKEN}*.json are, and directories"
    )


def _from_folder(path: Path) -> Tokenizer:
    names = {entry.name for entry in path.iterdir()}
    if HF_FILE in names:
        return _hf(path).from_folder(path)
    try:
        config = read_config(path)
    except ValueError:
        # Someone else's, known by the vocabulary; or nothing, and then this was the reason.
        if legacy.gpt2_pair(names):
            return _hf_files(path, legacy.from_gpt2)
        if legacy.WORDPIECE_FILE in names:
            return _hf_files(path, legacy.from_wordpiece)
        if (file := path / f"{_TEKKEN}.json").is_file() or (file := path / _MODEL_FILE).is_file():
            return _from_file(file)
        raise
    return _from_config(path, config)


def _from_config(path: Path, config: Mapping[str, Any]) -> Tokenizer:
    kind = config.get("kind")
    where = path / CONFIG_FILE
    if kind == "byte":
        return ByteTokenizer()
    if kind == "null":
        if type(config.get("num_ids")) is not int:
            raise ValueError(f"{where}: num_ids is {config.get('num_ids')!r}, it must be a number")
        return NullTokenizer(config["num_ids"])
    if kind not in ("sentencepiece", "tiktoken", "tekken"):
        raise ValueError(
            f"{where}: unknown kind {kind!r}, known are byte, null, sentencepiece, tekken and "
            "tiktoken"
        )
    name = config.get("file")
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"{where}: file is {name!r}, it must name a file beside")
    file = path / name
    if not file.is_file():
        raise ValueError(f"{file}: no such file, {CONFIG_FILE} names it")
    if kind == "sentencepiece":
        return _sentencepiece(file, exact=bool(config.get("exact", False)))
    if kind == "tekken":
        return _tiktoken(file).from_tekken(file.read_bytes(), where=str(file))
    for option, wanted in (("pattern", str), ("special_tokens", dict), ("roles", dict)):
        if not isinstance(value := config.get(option), wanted | None):
            raise ValueError(f"{where}: {option} is {value!r}, it must be a {wanted.__name__}")
    return _tiktoken(file).from_tiktoken(
        file.read_bytes(),
        pattern=config.get("pattern"),
        special_tokens=config.get("special_tokens"),
        roles=config.get("roles"),
        where=str(file),
    )


def _sentencepiece(path: Path, *, exact: bool) -> Tokenizer:
    # Deferred: a program that uses bytes need not load the library.
    from mcore_data.tokenizers.sentencepiece import SentencePieceTokenizer

    return SentencePieceTokenizer.from_file(path, exact=exact)


def _hf(path: Path) -> "type[HFTokenizer]":
    try:  # optional, and deferred as above
        from mcore_data.tokenizers.hf import HFTokenizer
    except ModuleNotFoundError as error:
        raise _missing(error, "tokenizers", "hf", path) from None
    return HFTokenizer


def _hf_files(
    path: Path, make: Callable[[Mapping[str, bytes], str | Path], dict[str, bytes]]
) -> Tokenizer:
    kind = _hf(path)
    found = {entry.name: entry.read_bytes() for entry in path.iterdir() if entry.name in _READ}
    return kind(make(found, path), where=str(path))


def _tiktoken(path: Path) -> "type[TiktokenTokenizer]":
    try:
        from mcore_data.tokenizers.tiktoken import TiktokenTokenizer
    except ModuleNotFoundError as error:
        raise _missing(error, "tiktoken", "tiktoken", path) from None
    return TiktokenTokenizer


def _missing(error: ModuleNotFoundError, library: str, extra: str, path: Path) -> Exception:
    if error.name != library:
        return error
    return ValueError(f"{path}: it needs the library {library}: pip install 'mcore-data[{extra}]'")
