"""Conversations to tokens, with the answers that training learns marked."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mcore_data.chat import ChatTemplate, Message
from mcore_data.datasets.documents import LEARNED
from mcore_data.indexed import token_dtype
from mcore_data.preprocessing.encode import (
    BadDocumentError,
    Encoded,
    Gathered,
    json_object,
)
from mcore_data.preprocessing.job import Job
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
    tools: Sequence[Any] | None = None,
) -> Conversation:
    """Return the tokens of a conversation and which of them are learned.

    `learn`: what the assistant says (in every turn, or in the last one alone) with the token that
    ends its turn, or everything. What an answer adds is found by writing the conversation up to it
    and with it. `tools` are those that the template may describe.

    Raises:
        ValueError: the template refuses the messages, writes earlier turns differently once there
            are later ones, or no message is the assistant's.

    """
    writer = _Writer(messages=messages, template=template, tokenizer=tokenizer, tools=tools)
    ids = writer.encode(len(messages), prompt=False)
    learned = np.full(len(ids), learn == "all")
    if learn != "all":
        answers = [k for k, message in enumerate(messages) if message.get("role") == "assistant"]
        if not answers:
            raise ValueError("no message is the assistant's, there is nothing to learn")
        text = writer.render(len(messages), prompt=False)
        for k in answers if learn == "assistant" else answers[-1:]:
            begin = writer.shared(k, ids, text, prompt=True)
            end = writer.shared(k + 1, ids, text, prompt=False)
            learned[begin : _turn_end(ids, begin, end, template)] = True
    return Conversation(tokens=np.array(ids, np.int64), learned=learned)


@dataclass(frozen=True, kw_only=True)
class _Writer:
    """A conversation as the template writes its first messages."""

    messages: Sequence[Message]
    template: ChatTemplate
    tokenizer: Tokenizer
    tools: Sequence[Any] | None

    def render(self, count: int, *, prompt: bool) -> str:
        part = self.messages[:count]
        return self.template.render(part, add_generation_prompt=prompt, tools=self.tools)

    def encode(self, count: int, *, prompt: bool) -> list[int]:
        return self.template.encode(
            self.messages[:count], self.tokenizer, add_generation_prompt=prompt, tools=self.tools
        )

    def shared(self, count: int, ids: list[int], text: str, *, prompt: bool) -> int:
        """Return how many of `ids`, those of `text`, are those of the first `count` messages."""
        if not text.startswith(self.render(count, prompt=prompt)):
            raise ValueError(
                f"chat template: it writes the first {count} of {len(self.messages)} messages "
                "differently once others follow, so the answers cannot be told apart; learn the "
                "last alone, or all"
            )
        head = self.encode(count, prompt=prompt)
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
class _ChatEncoder:
    """Turns lines with conversations into documents with modes."""

    template: ChatTemplate
    tokenizer: Tokenizer
    key: str
    learn: Learn

    @property
    def multimodal(self) -> bool:
        """The mode says what is learned."""
        return True

    def options(self) -> dict[str, object]:
        """Return what decides the result beside the tokenizer."""
        template = self.template
        return {
            "key": self.key,
            "learn": self.learn,
            "template": [template.source, template.tokens, template.bos_token, template.eos_token],
        }

    def __call__(self, task: Task) -> Encoded:
        """Return the tokens of a task; a conversation that cannot be written is bad."""
        assert isinstance(task, LinesTask)
        gathered = Gathered(token_dtype(self.tokenizer.vocab_size), multimodal=True)
        bad, empty = [], 0
        for number, line in text_lines(task):
            try:
                value = json_object(line)
                conversation = tokenise_conversation(
                    _messages(value, self.key),
                    self.template,
                    self.tokenizer,
                    learn=self.learn,
                    tools=_tools(value),
                )
                if len(conversation.tokens):
                    lengths, modes = conversation.spans()
                    cuts = np.cumsum(lengths)[:-1]
                    gathered.add(np.split(conversation.tokens, cuts), modes)
                else:
                    empty += 1
            except ValueError as error:
                bad.append(f"{task.path}:{number}: {error}")
        documents = {self.key: gathered.documents()}
        return Encoded(documents=documents, empty=empty, repaired=0, bad=tuple(bad))


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


def _tools(value: Mapping[str, Any]) -> list[Any] | None:
    tools = value.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadDocumentError("'tools' is no list")
    return tools or None


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
    resume: bool = False,
    partition: tuple[int, int] = (0, 1),
    progress: bool | None = None,
) -> PreprocessReport:
    """Tokenise conversations into `.bin/.idx` files for `DocumentDataset`, in order.

    A document is a conversation; its sequences are stretches that are learned (mode 1) or not
    (mode 0). Inputs are JSONL files, folders or patterns, each line an object with a list of
    messages under `key` and, if it has any, a list of tools under `tools`. The other arguments are
    those of `preprocess`.

    Raises:
        ValueError: as `preprocess`; a conversation that the template refuses is a bad line.
        ChildProcessError: a worker died.

    """
    if learn not in ("assistant", "last", "all"):
        raise ValueError(f"learn is {learn!r}, it can be assistant, last or all")
    job = Job(
        encoder=_ChatEncoder(template=template, tokenizer=tokenizer, key=key, learn=learn),
        outputs={key: Path(output)},
        dtype=token_dtype(tokenizer.vocab_size),
        workers=workers,
        strict=strict,
        partition=partition,
        progress=progress,
    )
    files = expand_inputs([inputs] if isinstance(inputs, str | Path) else inputs)
    if plain := [path for path in files if not is_jsonl(path)]:
        raise ValueError(f"{plain[0]}: conversations come in JSONL files")
    return job.run(file_tasks(files), files=files if resume else None, base=Path(output))
