"""Vocabularies in files of their own, made into the `tokenizer.json` that says the same.

GPT-2's byte-level BPE (`encoder.json` and `vocab.bpe`, or `vocab.json` and `merges.txt`) and BERT's
WordPiece (`vocab.txt`). Pure functions from contents of files to contents of files.
"""

import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mcore_data.tokenizers.base import CONFIG_FILE, HF_FILE, SPECIAL_MAP

GPT2_FILES: Final = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
WORDPIECE_FILE: Final = "vocab.txt"
_ROLES: Final = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token")
_WORD_END: Final = "</w>"
_GPT2_END: Final = "<|endoftext|>"
_BERT: Final = {"unk_token": "[UNK]", "bos_token": "[CLS]", "eos_token": "[SEP]"}
_BERT_OTHERS: Final = {"pad_token": "[PAD]", "mask_token": "[MASK]"}


def gpt2_pair(names: Container[str]) -> tuple[str, str] | None:
    """Return the pair of files by which a folder is one of GPT-2's kind."""
    return next((pair for pair in GPT2_FILES if all(name in names for name in pair)), None)


def from_gpt2(files: Mapping[str, bytes], where: str | Path) -> dict[str, bytes]:
    """Return `tokenizer.json` and `tokenizer_config.json` for a vocabulary and its merges.

    Special are the tokens that `tokenizer_config.json` or `special_tokens_map.json` name, or
    `<|endoftext|>`. ValueError names the file and line that is wrong.
    """
    pair = gpt2_pair(files)
    assert pair is not None
    vocabulary = _vocabulary(files[pair[0]], f"{where}/{pair[0]}")
    _check_bytes(vocabulary, f"{where}/{pair[0]}")
    merges = _merges(files[pair[1]], vocabulary, f"{where}/{pair[1]}")
    config = _config(files, where)
    default = {"bos_token": _GPT2_END, "eos_token": _GPT2_END} if _GPT2_END in vocabulary else {}
    roles = _roles(config) or default
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": bool(config.get("add_prefix_space", False)),
        "trim_offsets": True,
        "use_regex": True,
    }
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges}
    return _files(
        {"model": model, "pre_tokenizer": byte_level, "decoder": byte_level},
        vocabulary,
        roles,
        where,
    )


def from_wordpiece(files: Mapping[str, bytes], where: str | Path) -> dict[str, bytes]:
    """Return `tokenizer.json` and `tokenizer_config.json` for a `vocab.txt`, a word piece a line.

    Text is made small if `do_lower_case` of `tokenizer_config.json` says so, by default if no piece
    has a capital. `[CLS]` begins a text and `[SEP]` ends it. ValueError names what is missing.
    """
    name = f"{where}/{WORDPIECE_FILE}"
    try:
        text = files[WORDPIECE_FILE].decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: no UTF-8 ({error})") from None
    pieces = text.removesuffix("\n").split("\n")  # a piece may be a line separator of Unicode
    vocabulary: dict[str, int] = {}
    for i, piece in enumerate(pieces):
        if vocabulary.setdefault(piece, i) != i:
            raise ValueError(
                f"{name}:{i + 1}: {piece!r} stands on line {vocabulary[piece] + 1} too"
            )
    missing = [token for token in _BERT.values() if token not in vocabulary]
    if missing:
        raise ValueError(
            f"{name}: no word pieces, {missing[0]} is not among its {len(pieces)} lines"
        )
    config = _config(files, where)
    roles = _BERT | {role: text for role, text in _BERT_OTHERS.items() if text in vocabulary}
    cased = any(piece != piece.lower() for piece in pieces if not piece.startswith("["))
    parts = {
        "model": {
            "type": "WordPiece",
            "vocab": vocabulary,
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": bool(config.get("tokenize_chinese_chars", True)),
            "strip_accents": config.get("strip_accents"),
            "lowercase": bool(config.get("do_lower_case", not cased)),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "BertProcessing",
            "sep": ["[SEP]", vocabulary["[SEP]"]],
            "cls": ["[CLS]", vocabulary["[CLS]"]],
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    }
    return _files(parts, vocabulary, roles, where)


def _vocabulary(raw: bytes, where: str) -> dict[str, int]:
    value = _object(raw, where)
    if not value or not all(type(i) is int and i >= 0 for i in value.values()):
        raise ValueError(f"{where}: no vocabulary, it must hold an id for each token")
    return value


def _check_bytes(vocabulary: Mapping[str, int], where: str) -> None:
    """Refuse what the library would encode without a word: by leaving text out, or otherwise."""
    if f"a{_WORD_END}" in vocabulary:
        raise ValueError(
            f"{where}: no vocabulary of GPT-2's kind, 'a{_WORD_END}' marks the end of a word: make "
            f"a {HF_FILE} of it"
        )
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters = [chr(byte) for byte in sorted(shown)] + [
        chr(256 + n) for n in range(256 - len(shown))
    ]
    if missing := [letter for letter in letters if letter not in vocabulary]:
        raise ValueError(
            f"{where}: {len(missing)} of the letters that stand for the 256 bytes have no id, the "
            f"first is {missing[0]!r}"
        )


def _merges(raw: bytes, vocabulary: Mapping[str, int], where: str) -> list[str]:
    merges = []
    for number, line in enumerate(raw.decode("utf-8", "replace").splitlines(), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or any(part not in vocabulary for part in (*parts, "".join(parts))):
            raise ValueError(f"{where}:{number}: {line[:40]!r} is no merge of two known tokens")
        merges.append(line)
    return merges


def _object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: no JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: it holds no JSON object")
    return value


def _config(files: Mapping[str, bytes], where: str | Path) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name in (SPECIAL_MAP, CONFIG_FILE):
        config |= _object(files.get(name, b"{}"), f"{where}/{name}")
    return config


def _roles(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for role in _ROLES:
        token = config.get(role)
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str):
            found[role] = text
    return found


def _files(
    parts: Mapping[str, Any],
    vocabulary: Mapping[str, int],
    roles: Mapping[str, str],
    where: str | Path,
) -> dict[str, bytes]:
    added = _added_tokens(vocabulary, sorted(set(roles.values())), where)
    empty = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    tokenizer = {"version": "1.0", **dict.fromkeys(empty), "added_tokens": added, **parts}
    return {
        HF_FILE: json.dumps(tokenizer, ensure_ascii=False).encode(),
        CONFIG_FILE: (json.dumps(dict(roles), indent=2) + "\n").encode(),
    }


def _added_tokens(
    vocabulary: Mapping[str, int], names: Sequence[str], where: str | Path
) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = []
    for name in names:
        if name not in vocabulary:
            raise ValueError(f"{where}: special token {name!r} is not in the vocabulary")
        added.append({"id": vocabulary[name], "content": name, **flags, "special": True})
    return sorted(added, key=lambda token: int(token["id"]))
