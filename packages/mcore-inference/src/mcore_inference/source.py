"""What a checkpoint or a Hugging Face folder says besides its tensors: model and tokenizer."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mcore_ckpt
from mcore_ckpt.addresses import Place, check_shared
from mcore_ckpt.hf import HFFolder
from mcore_data import ChatTemplate, Tokenizer, load_tokenizer
from mcore_models import ModelConfig
from mcore_models.hf import Architecture
from mcore_parallel import Group, broadcast_object

_TOKENIZER, _HF = "tokenizer", "hf"
"""Folders among the files of a checkpoint: of the tokenizer, and of what it was converted from."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a checkpoint or a folder says besides its tensors; `place` is where those are."""

    place: Place
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    end_ids: tuple[int, ...]
    start_id: int


def on_first_rank(look: Callable[[], Source], world: Group) -> Source:
    """Return what rank 0 finds, or raise its error on every rank.

    One rank chooses: while a run still saves, the others might find a newer checkpoint.
    """
    found: Source | Exception | None = None
    if world.rank == 0:
        try:
            found = look()
        except Exception as error:  # whatever it is: the others wait for an answer
            found = error
    found = broadcast_object(found, 0, world)
    if isinstance(found, Exception):
        raise found
    assert found is not None
    return found


def open_checkpoint(
    path: str | Path,
    tokenizer: Tokenizer | str | Path | None,
    chat_template: str | Path | None,
    num_ranks: int,
) -> Source:
    """Return what the checkpoint at a path or an address says; errors as `LLM.from_checkpoint`.

    num_ranks: how many will read its tensors.
    """
    check_shared(path, num_ranks)
    checkpoint = mcore_ckpt.open(path)
    config = _architecture(checkpoint)
    with _files(checkpoint) as folder:
        if tokenizer is None:
            tokenizer = folder / _TOKENIZER
            if not tokenizer.is_dir():
                raise ValueError(f"{checkpoint.path} has no tokenizer in it: give one")
        tokenizer, chat = _talk(tokenizer, chat_template)
        return Source(
            place=checkpoint.path,
            config=config,
            tokenizer=tokenizer,
            chat_template=chat,
            end_ids=generation_ends(folder / _HF),
            start_id=generation_start(folder / _HF),
        )


@contextmanager
def _files(checkpoint: mcore_ckpt.Checkpoint) -> Iterator[Path]:
    """Give the folder of a checkpoint's files, for an address a temporary one with what is read."""
    if isinstance(checkpoint.path, Path):
        yield checkpoint.path / "files"
        return
    with tempfile.TemporaryDirectory() as made:
        for name in checkpoint.manifest.files:
            if name.partition("/")[0] in (_TOKENIZER, _HF):
                file = Path(made, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(checkpoint.file(name))
        yield Path(made)


def open_hf(
    folder: str | Path,
    architectures: Mapping[str, Architecture],
    tokenizer: Tokenizer | str | Path | None,
    chat_template: str | Path | None,
) -> Source:
    """Return what a Hugging Face folder says; errors as `LLM.from_hf`."""
    opened = HFFolder.open(folder, known=architectures)
    tokenizer, chat = _talk(opened.path if tokenizer is None else tokenizer, chat_template)
    return Source(
        place=opened.path,
        config=opened.model,
        tokenizer=tokenizer,
        chat_template=chat,
        end_ids=generation_ends(opened.path),
        start_id=generation_start(opened.path),
    )


def _talk(
    tokenizer: Tokenizer | str | Path, chat_template: str | Path | None
) -> tuple[Tokenizer, ChatTemplate]:
    place = None
    if isinstance(tokenizer, str | Path):
        place = Path(tokenizer) if Path(tokenizer).is_dir() else None
        tokenizer = load_tokenizer(tokenizer)
    return tokenizer, ChatTemplate.load(place, tokenizer, file=chat_template)


def generation_ends(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a text according to the files of Hugging Face in a folder.

    `eos_token_id` of `generation_config.json`, or without that file of `config.json`: one or
    several, or none.
    """
    ends = _generation(folder, "eos_token_id")
    return tuple(ends if isinstance(ends, list) else [] if ends is None else [ends])


def generation_start(folder: Path) -> int:
    """Return the id from which a decoder that reads an encoder starts, `decoder_start_token_id`.

    Of the same files; 0, T5's padding, where they do not say.
    """
    return int(_generation(folder, "decoder_start_token_id") or 0)


def _generation(folder: Path, field: str) -> Any:
    """A field of the first of the two files that is there; None without it."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            try:
                return json.loads(path.read_bytes()).get(field)
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{path}: no JSON object ({error})") from None
    return None


def _architecture(checkpoint: mcore_ckpt.Checkpoint) -> ModelConfig:
    where = checkpoint.path
    try:
        return ModelConfig(**checkpoint.state["config"]["model"])
    except KeyError as error:
        raise ValueError(f"{where} has no model architecture in it: no {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: its model architecture cannot be built: {error}") from None
