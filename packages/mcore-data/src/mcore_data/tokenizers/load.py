"""Open a tokenizer by name or directory."""

from pathlib import Path

from mcore_data.tokenizers.base import CONFIG_FILE, HF_FILE, Tokenizer, read_config
from mcore_data.tokenizers.byte import ByteTokenizer


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Return the tokenizer that `source` names.

    `source` is `byte`, a directory that `save` wrote, a folder of Hugging Face with a
    `tokenizer.json`, or a SentencePiece `.model` file. Nothing is fetched from anywhere. ValueError
    says what is missing or unknown.
    """
    path = Path(source)
    if path.is_file() and path.suffix == ".model":
        return _sentencepiece(path, exact=False)
    if str(source) == "byte" and not path.is_dir():
        return ByteTokenizer()
    if not path.is_dir():
        raise ValueError(
            f"{source}: no tokenizer; give a directory with {CONFIG_FILE} or "
            f"{HF_FILE}, a .model file, or byte"
        )
    if (path / HF_FILE).is_file():
        return _hf(path)
    config = read_config(path)
    kind = config.get("kind")
    if kind == "byte":
        return ByteTokenizer()
    if kind == "sentencepiece":
        name = config.get("file")
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{path / CONFIG_FILE}: file is {name!r}, it must name a file beside")
        if not (path / name).is_file():
            raise ValueError(f"{path / name}: no such file, {CONFIG_FILE} names it")
        return _sentencepiece(path / name, exact=bool(config.get("exact", False)))
    raise ValueError(
        f"{path / CONFIG_FILE}: unknown kind {kind!r}, known are byte and sentencepiece"
    )


def _sentencepiece(path: Path, *, exact: bool) -> Tokenizer:
    # Deferred: a program that uses bytes need not load the library.
    from mcore_data.tokenizers.sentencepiece import SentencePieceTokenizer

    return SentencePieceTokenizer.from_file(path, exact=exact)


def _hf(path: Path) -> Tokenizer:
    try:  # optional, and deferred as above
        from mcore_data.tokenizers.hf import HFTokenizer
    except ModuleNotFoundError as error:
        if error.name != "tokenizers":
            raise
        raise ValueError(
            f"{path / HF_FILE} needs the tokenizers library: pip install 'mcore-data[hf]'"
        ) from None
    return HFTokenizer.from_folder(path)
