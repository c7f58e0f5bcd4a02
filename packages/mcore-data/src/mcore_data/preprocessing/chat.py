"""Conversations to tokens, with the answers that training learns marked."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mcore_data.chat import ChatTemplate, Message
from mcore_data.datasets.documents import LEARNED
from mcore_data.indexed import IndexedWriter, token_dtype
from mcore_data.preprocessing.encode import BadDocumentError, json_object
from mcore_data.preprocessing.pool import ordered_map
from mcore_data.preprocessing.report import PreprocessReport
from mcore_data.preprocessing.sources import (
    LinesTask,
    Task,
    expand_inputs,
    file_tasks,
    is_jsonl,
    text_lines,
)
from mcore_data.tokenizers import Tokenizer

Learn = Literal["assistant", "last", "all"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversation:
    """The tokens of a conversation.

    Attributes:
        tokens: ids, int64 [n].
        learned: whether each is to be learned, bool [n].

    """

    tokens: NDArray[np.int64]
    learned: NDArray[np.bool_]

    def spans(self) -> tuple[list[int], list[int]]:
        """Return the lengths of the alternating stretches and the mode of each."""
        cuts = np.flatnonzero(np.diff(self.learned)) + 1
        bounds = np.concatenate([[0], cuts, [len(self.tokens)]])
        modes = self.learned[bounds[:-1]].astype(np.int64) * LEARNED if len(self.tokens) else []
        return np.diff(bounds).tolist(), [int(mode) for mode in modes]


def tokenise_conversation(
    messages: Sequence[Message],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    learn: Learn = "assistant",
) -> Conversation:
    """Return the tokens of a conversation and which of them are learned.

    `learn`: what the assistant says (in every turn, or in the last one alone) with the token that
    ends its turn, or everything. What an answer adds is found by writing the conversation up to it
    and with it.

    Raises:
        ValueError: the template refuses the messages, writes earlier turns differently once there
            are later ones, or no message is the assistant's.

    """
    ids = template.encode(messages, tokenizer, add_generation_prompt=False)
    learned = np.full(len(ids), learn == "all")
    if learn != "all":
        answers = [k for k, message in enumerate(messages) if message.get("role") == "assistant"]
        if not answers:
            raise ValueError("no message is the assistant's, there is nothing to learn")
        text = template.render(messages, add_generation_prompt=False)
        for k in answers if learn == "assistant" else answers[-1:]:
            begin = _shared(messages, k, True, ids, text, template, tokenizer)
            end = _shared(messages, k + 1, False, ids, text, template, tokenizer)
            learned[begin : _turn_end(ids, begin, end, template)] = True
    return Conversation(tokens=np.array(ids, np.int64), learned=learned)


def _shared(  # noqa: PLR0917
    messages: Sequence[Message],
    count: int,
    prompt: bool,
    ids: list[int],
    text: str,
    template: ChatTemplate,
    tokenizer: Tokenizer,
) -> int:
    """Return how many of `ids` are those of the first `count` messages."""
    part = messages[:count]
    if not text.startswith(template.render(part, add_generation_prompt=prompt)):
        raise ValueError(
            f"chat template: it writes the first {count} of {len(messages)} messages differently "
            "once others follow, so the answers cannot be told apart; learn the last alone, or all"
        )
    head = template.encode(part, tokenizer, add_generation_prompt=prompt)
    size = min(len(head), len(ids))
    differs = np.flatnonzero(np.array(head[:size]) != np.array(ids[:size]))
    return int(differs[0]) if len(differs) else size


def _turn_end(ids: list[int], begin: int, end: int, template: ChatTemplate) -> int:
    """Leave out what the template writes after the token that ends the turn."""
    mark = template.turn_end()
    if mark is not None:
        for place in range(end - 1, begin - 1, -1):
            if ids[place] == mark:
                return place + 1
    return end


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    conversations: list[Conversation]
    empty: int
    bad: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Encoder:
    template: ChatTemplate
    tokenizer: Tokenizer
    key: str
    learn: Learn

    def __call__(self, task: Task) -> _Encoded:
        assert isinstance(task, LinesTask)
        made, bad, empty = [], [], 0
        for number, line in text_lines(task):
            try:
                messages = _messages(json_object(line), self.key)
                conversation = tokenise_conversation(
                    messages, self.template, self.tokenizer, learn=self.learn
                )
            except ValueError as error:
                bad.append(f"{task.path}:{number}: {error}")
                continue
            if len(conversation.tokens):
                made.append(conversation)
            else:
                empty += 1
        return _Encoded(conversations=made, empty=empty, bad=tuple(bad))


def _messages(value: Mapping[str, Any], key: str) -> list[Message]:
    if key not in value:
        found = ", ".join(repr(k) for k in list(value)[:8]) or "none"
        raise BadDocumentError(f"no key {key!r}; keys are {found}")
    messages = value[key]
    if not isinstance(messages, list) or not messages:
        raise BadDocumentError(f"{key!r} is no list of messages")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadDocumentError(f"message {place} of {key!r} is no object with a role")
    return messages


def preprocess_chat(
    inputs: Iterable[str | Path],
    *,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    output: str | Path,
    key: str = "messages",
    learn: Learn = "assistant",
    workers: int = 1,
    strict: bool = False,
) -> PreprocessReport:
    """Tokenise conversations into `.bin/.idx` files for `DocumentDataset`, in order.

    A document is a conversation; its sequences are stretches that are learned (mode 1) or not
    (mode 0). Inputs are JSONL files, folders or patterns, each line an object with a list of
    messages under `key`.

    Raises:
        ValueError: as `preprocess`; a conversation that the template refuses is a bad line.
        ChildProcessError: a worker died.

    """
    if learn not in ("assistant", "last", "all"):
        raise ValueError(f"learn is {learn!r}, it can be assistant, last or all")
    begin = time.perf_counter()
    files = expand_inputs([inputs] if isinstance(inputs, str | Path) else inputs)
    if plain := [path for path in files if not is_jsonl(path)]:
        raise ValueError(f"{plain[0]}: conversations come in JSONL files")
    encoder = _Encoder(template=template, tokenizer=tokenizer, key=key, learn=learn)
    report = PreprocessReport(outputs=(Path(output),))
    dtype = token_dtype(tokenizer.vocab_size)
    with IndexedWriter(output, dtype, multimodal=True) as writer:
        for part in ordered_map(encoder, file_tasks(files), workers=workers):
            if strict and part.bad:
                raise ValueError(part.bad[0])
            for conversation in part.conversations:
                lengths, modes = conversation.spans()
                writer.add_document(conversation.tokens, lengths, modes)
            report = replace(
                report.with_bad(part.bad),
                documents=writer.num_documents,
                tokens=writer.num_tokens,
                empty=report.empty + part.empty,
            )
        report.check_written()
    return replace(report, seconds=time.perf_counter() - begin)
