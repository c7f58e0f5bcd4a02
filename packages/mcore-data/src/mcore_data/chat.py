"""From the messages of a conversation to the tokens that a model continues."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from mcore_data.tokenizers import Tokenizer

Message = Mapping[str, Any]
"""One turn: `role` and `content`, and whatever else the template reads."""

PLAIN_TEMPLATE: Final = (
    "{% for message in messages %}{% if message.content is not string %}"
    "{{ raise_exception('the content of a message is no text, and there is no chat template') }}"
    "{% endif %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Used where a tokenizer brings no template: a line `role: content` per turn."""

_TEMPLATE_FILE: Final = "chat_template.jinja"
_CONFIG_FILE: Final = "tokenizer_config.json"
_TOKENIZER_FILE: Final = "tokenizer.json"
_PRIVATE_USE: Final = range(0xE000, 0xF900)  # characters that no text gives a meaning


class ChatTemplate:
    """A Jinja template over `messages`, in the conventions of Hugging Face tokenizers.

    The template runs in a sandbox: it can read what it is given and nothing else. It sees
    `messages`, `tools`, `add_generation_prompt`, `bos_token`, `eos_token`, `raise_exception(text)`
    and `strftime_now(format)`. Picklable.

    Args:
        source: the template; default a line `role: content` per turn.
        tokens: the special tokens: texts that stand for one id each where the template writes them.
        bos_token, eos_token: those of `tokens` that the template gets under these names; empty
            where there is none.
        where: what to call it when it is no Jinja.

    Raises:
        ValueError: the template is no Jinja, with the line.
    """

    def __init__(
        self,
        source: str = PLAIN_TEMPLATE,
        *,
        tokens: Mapping[str, int] | None = None,
        bos_token: str = "",
        eos_token: str = "",
        where: str = "chat template",
    ) -> None:
        self.source = source
        given = tokens or {}
        # Longest first, as the pattern takes the first that matches.
        self.tokens = {text: given[text] for text in sorted(given, key=len, reverse=True)}
        self.bos_token = bos_token
        self.eos_token = eos_token
        self._template = _compile(source, where)
        self._special = re.compile("|".join(map(re.escape, self.tokens)) or r"(?!)")

    @classmethod
    def load(
        cls, folder: str | Path | None, tokenizer: Tokenizer, *, file: str | Path | None = None
    ) -> ChatTemplate:
        """Read the template and special tokens of a tokenizer's folder.

        The template is `file` if given, else `chat_template.jinja` of the folder, else
        `chat_template` in its `tokenizer_config.json`, else the plain one. Special tokens are the
        added tokens that the folder's JSON files call special, else those that the tokenizer names;
        without any, `<s>` and `</s>` stand for the tokenizer's own ids of begin and end.

        Raises:
            FileNotFoundError: `file` is not there.
            ValueError: a file is damaged, or a special token lies outside the tokenizer.
        """
        path = None if folder is None else Path(folder)
        config = _read_json(path / _CONFIG_FILE) if path else {}
        tokens = (_special_tokens(path, config) if path else {}) or dict(tokenizer.special_tokens)
        names = {}
        for name, default, known in (
            ("bos_token", "<s>", tokenizer.bos_id),
            ("eos_token", "</s>", tokenizer.eos_id),
        ):
            text = _content(config.get(name))
            if not text and known is not None:
                text = next((spelt for spelt, token in tokens.items() if token == known), default)
            if text and text not in tokens and known is not None:
                tokens[text] = known
            names[name] = text
        for text, token in tokens.items():
            if not 0 <= token < tokenizer.vocab_size:
                raise ValueError(
                    f"{path}: special token {text!r} has id {token}, outside the "
                    f"{tokenizer.vocab_size} of the tokenizer"
                )
        source, where = _source(path, config, None if file is None else Path(file))
        return cls(source, tokens=tokens, where=where, **names)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """Return the conversation as one text, special tokens spelled out.

        `add_generation_prompt` asks for the beginning of the assistant's turn at the end; `tools`
        are JSON-able descriptions of functions, for templates that tell the model of them.

        Raises:
            ValueError: the template refuses the messages or fails on them, in one line.
        """
        try:
            return str(
                self._template.render(
                    messages=list(messages),
                    tools=None if tools is None else list(tools),
                    add_generation_prompt=add_generation_prompt,
                    bos_token=self.bos_token,
                    eos_token=self.eos_token,
                )
            )
        except Exception as error:  # a template is a program: it may fail in any way
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"chat template: {reason}") from None

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        """Return the ids of the conversation.

        Special tokens count where the template writes them. In the messages and tools they are
        plain text: nobody ends a turn by writing the token that does.

        Raises:
            ValueError: as `render` and `tokenizer.encode` do.
        """
        guard = self._unused_character([messages, tools])
        text = self.render(
            self._guarded(messages, guard),
            add_generation_prompt=add_generation_prompt,
            tools=self._guarded(tools, guard),
        )
        ids: list[int] = []
        end = 0
        for match in self._special.finditer(text):
            ids += _encode(tokenizer, text[end : match.start()].replace(guard, ""))
            ids.append(self.tokens[match.group()])
            end = match.end()
        return ids + _encode(tokenizer, text[end:].replace(guard, ""))

    def turn_end(self) -> int | None:
        """Return the id of the special token after an assistant's turn, None where there is none.

        Read off a conversation that the template writes: a model taught with it ends its answers
        so, whatever the tokenizer calls its end of text.
        """
        mark = self._unused_character([])
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
        try:
            text = self.render(turns, add_generation_prompt=False)
        except ValueError:
            return None
        _, found, rest = text.partition(mark)
        match = self._special.match(rest.lstrip()) if found else None
        return self.tokens[match.group()] if match else None

    def _guarded(self, value: Any, guard: str) -> Any:
        """`value` with `guard` inside every special token that its texts spell."""
        if isinstance(value, str):
            return self._special.sub(lambda m: m.group()[:1] + guard + m.group()[1:], value)
        if isinstance(value, Mapping):
            return {
                self._guarded(key, guard): self._guarded(item, guard) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._guarded(item, guard) for item in value]
        return value

    def _unused_character(self, values: Any) -> str:
        used = {*self.source}.union(*(set(text) for text in _texts(values)))
        free = next((chr(code) for code in _PRIVATE_USE if chr(code) not in used), None)
        if free is None:
            raise ValueError("the messages hold every private-use character: leave one out")
        return free

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.source, self.tokens, self.bos_token, self.eos_token)


def _rebuild(source: str, tokens: dict[str, int], bos_token: str, eos_token: str) -> ChatTemplate:
    return ChatTemplate(source, tokens=tokens, bos_token=bos_token, eos_token=eos_token)


def _compile(source: str, where: str) -> Any:
    # Deferred: whoever tokenises a corpus need not load the library.
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` marks what training learns: here plain text."""

        tags = {"generation"}  # noqa: RUF012  # the library's own declaration

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(
                ("name:endgeneration",), drop_needle=True
            )
            return body

    class Sandbox(ImmutableSandboxedEnvironment):
        """Refuses where the library would only give nothing."""

        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            kind = type(obj).__name__
            raise SecurityError(f"access to attribute {attribute!r} of {kind!r} object is unsafe")

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ValueError(f"{where}: line {error.lineno}: {error.message}") from None


def _to_json(value: Any, indent: int | None = None) -> str:
    # Not Jinja's own, which escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text) if text else []


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts((key, item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _source(folder: Path | None, config: Mapping[str, Any], file: Path | None) -> tuple[str, str]:
    """Return the template and what to call it."""
    beside = folder / _TEMPLATE_FILE if folder else None
    if file is not None or (beside is not None and beside.is_file()):
        path = file or beside
        assert path is not None
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: no UTF-8 ({error})") from None
    template = config.get("chat_template")
    where = f"{folder and folder / _CONFIG_FILE}: chat_template"
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template, where = named.get("default"), f"{where} named default"
        if template is None:
            raise ValueError(f"{where}: not there, only {sorted(map(str, named))}")
    if template is None:
        return PLAIN_TEMPLATE, "the plain chat template"
    if not isinstance(template, str):
        raise ValueError(f"{where}: it is {type(template).__name__}, not text")
    return template, where


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the special tokens that a folder's JSON files declare, by text."""
    declared = config.get("added_tokens_decoder")
    where, added = folder / _CONFIG_FILE, []
    if declared is None:
        where = folder / _TOKENIZER_FILE
        added = _read_json(where).get("added_tokens", [])
    try:
        entries = [(int(entry["id"]), entry) for entry in added]
        if declared is not None:
            entries = [(int(token), entry) for token, entry in declared.items()]
        return {entry["content"]: token for token, entry in entries if entry.get("special")}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: its added tokens cannot be read: {error!r}") from None


def _content(token: Any) -> str:
    """Return the text of a token, which files give bare or in an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: it holds no JSON object")
    return value
