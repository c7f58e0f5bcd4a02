"""The tokenizer files of a checkpoint, as a Hugging Face folder has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mcore_ckpt.hf.folder import TOKENIZER_FILES

_CONFIG = "tokenizer_config.json"


def tokenizer_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return those of a tokenizer's files that transformers reads; none of a tokenizer of ours.

    files: contents by name. The descriptor of a tokenizer of ours has the name that Hugging Face
    gives to its own, and a "format".
    """
    if "format" in _object(files.get(_CONFIG, b"{}")):
        return {}
    return {name: data for name, data in files.items() if name in TOKENIZER_FILES}


def special_ids(files: Mapping[str, bytes]) -> dict[str, int | None]:
    """Return the ids of special tokens that a `config.json` has; None for one that is not there.

    files: as `tokenizer_files` returns them.
    """
    config = _object(files.get(_CONFIG, b"{}"))
    added = _object(files.get("tokenizer.json", b"{}")).get("added_tokens", [])
    ids = {entry.get("content"): entry.get("id") for entry in added if isinstance(entry, dict)}
    found: dict[str, int | None] = {}
    for name in ("bos", "eos", "pad"):
        token = config.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        found[f"{name}_token_id"] = ids.get(text)
    return found


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
