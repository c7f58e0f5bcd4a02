"""From JSON lines with a prompt and two answers to a file of preference pairs."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.chat import ChatTemplate
from mcore_data.datasets.preferences import add_preference
from mcore_data.indexed import IndexedWriter, token_dtype
from mcore_data.preprocessing import tokenise_conversation
from mcore_data.tokenizers import Tokenizer

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Preference:
    """The tokens of a pair: a prompt, and what each answer adds to it, int64 [*] each."""

    prompt: NDArray[np.int64]
    chosen: NDArray[np.int64]
    rejected: NDArray[np.int64]


def tokenise_preference(
    row: Mapping[str, Any], template: ChatTemplate, tokenizer: Tokenizer
) -> Preference:
    """Return the tokens of a pair, written with a chat template.

    `row` has `chosen` and `rejected`, and `prompt`, each a text or a list of messages; without
    `prompt` the answers are whole conversations with the same beginning. An answer is the last
    message, the assistant's, with the token that ends its turn. `tools` are passed to the template.

    Raises:
        ValueError: a key is missing, the answers follow different prompts, or the template refuses
            the messages.

    """
    sides = []
    for name in ("chosen", "rejected"):
        if name not in row:
            raise ValueError(f"no key {name!r}; keys are {', '.join(map(repr, row)) or 'none'}")
        messages = _messages(row.get("prompt", []), "user") + _messages(row[name], "assistant")
        made = tokenise_conversation(
            messages, template, tokenizer, learn="last", tools=row.get("tools")
        )
        learned = np.flatnonzero(made.learned)
        if not len(learned) or messages[-1].get("role") != "assistant":
            raise ValueError(f"{name} does not end with an answer of the assistant")
        begin = int(learned[0])
        sides.append((made.tokens[:begin], made.tokens[begin : int(learned[-1]) + 1]))
    (prompt, chosen), (other, rejected) = sides
    if not np.array_equal(prompt, other):
        size = min(len(prompt), len(other))
        differs = np.flatnonzero(prompt[:size] != other[:size])
        place = int(differs[0]) if len(differs) else size
        raise ValueError(f"chosen and rejected follow different prompts, from token {place} on")
    return Preference(prompt=prompt, chosen=chosen, rejected=rejected)


def _messages(value: Any, role: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise ValueError(f"{value!r:.60} is neither a text nor a list of messages")
    return value


def preprocess_preferences(
    source: str | Path | Iterable[Mapping[str, Any]],
    *,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    output: str | Path,
) -> int:
    """Write the pairs of a JSONL file, or those given, to `output.bin/.idx`; return their number.

    The files appear when they are whole.

    Raises:
        ValueError: a pair cannot be written (with file and line, or its number), or there is none.

    """
    count = 0
    dtype = token_dtype(tokenizer.vocab_size)
    with IndexedWriter(output, dtype, multimodal=True) as writer:
        for where, row in _rows(source):
            try:
                if not isinstance(row, Mapping):
                    raise ValueError("no JSON object")
                pair = tokenise_preference(row, template, tokenizer)
                add_preference(writer, pair.prompt, pair.chosen, pair.rejected)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            count += 1
        if not count:
            raise ValueError(f"{source}: there are no pairs")
    return count


def _rows(source: str | Path | Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    if not isinstance(source, str | Path):
        yield from ((f"pair {number}", row) for number, row in enumerate(source))
        return
    with open(source, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{source}:{number}"
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: no JSON ({error})") from None
            yield where, row
