"""Files of byte pairs by rank: `.tiktoken` (base64 and rank a line) and tekken's JSON."""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A published way to use a `.tiktoken` file: how text is cut, and the ids beside the ranks."""

    num_ranks: int
    pattern: str
    special_tokens: Mapping[str, int]


_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER: Final = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER: Final = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ENDING: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SCHEMES: Final[Mapping[str, Scheme]] = {
    "gpt2": Scheme(num_ranks=50_256, pattern=_GPT2, special_tokens={"<|endoftext|>": 50_256}),
    "cl100k_base": Scheme(
        num_ranks=100_256,
        pattern=_CL100K,
        special_tokens={
            "<|endoftext|>": 100_257,
            "<|fim_prefix|>": 100_258,
            "<|fim_middle|>": 100_259,
            "<|fim_suffix|>": 100_260,
            "<|endofprompt|>": 100_276,
        },
    ),
    "o200k_base": Scheme(
        num_ranks=199_998,
        pattern=_O200K,
        special_tokens={"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018},
    ),
}
_TEKKEN_SPECIAL: Final = (  # of files that do not list their own
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)


@dataclass(frozen=True, kw_only=True)
class RankVocabulary:
    """Byte pairs by rank, and the ids beside them.

    Attributes:
        ranks: rank of each run of bytes, 0 to n - 1; single bytes among them.
        pattern: regular expression of the stretches of text within which bytes are joined.
        first_id: id of rank 0.
        special_tokens: ids that no text gives, by their names.
        roles: special tokens by `bos_token`, `eos_token`, `pad_token`, `unk_token`.

    """

    ranks: Mapping[bytes, int]
    pattern: str
    first_id: int = 0
    special_tokens: Mapping[str, int]
    roles: Mapping[str, str] = field(default_factory=dict)

    def check(self, where: str) -> None:
        """Raise ValueError, naming the file, when the ids cannot be those of a tokenizer."""
        if sorted(self.ranks.values()) != list(range(len(self.ranks))):
            raise ValueError(f"{where}: the {len(self.ranks)} ranks are not 0, 1, 2 and so on")
        if missing := [byte for byte in range(256) if bytes([byte]) not in self.ranks]:
            raise ValueError(
                f"{where}: {len(missing)} of the 256 single bytes have no rank, the first is "
                f"{missing[0]}"
            )
        taken = range(self.first_id, self.first_id + len(self.ranks))
        for name, token in self.special_tokens.items():
            if token < 0 or token in taken:
                raise ValueError(
                    f"{where}: special token {name!r} has id {token}; {taken.start} to "
                    f"{taken.stop - 1} are those of the ranks"
                )
        for role, name in self.roles.items():
            if name not in self.special_tokens:
                raise ValueError(f"{where}: {role} {name!r} is no special token")


def read_tiktoken(raw: bytes, where: str) -> dict[bytes, int]:
    """Return the ranks of a `.tiktoken` file; ValueError names the first line that is none."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{where}:{number}: no line of base64 and rank") from None
    return ranks


def scheme_of(ranks: Mapping[bytes, int], where: str) -> str:
    """Return the name of the scheme with as many ranks; ValueError when there is none."""
    for name, scheme in SCHEMES.items():
        if scheme.num_ranks == len(ranks):
            return name
    known = ", ".join(f"{name} ({scheme.num_ranks:,})" for name, scheme in SCHEMES.items())
    raise ValueError(
        f"{where}: {len(ranks):,} ranks are none of {known}; put the file into a directory whose "
        "tokenizer_config.json names its pattern"
    )


def read_tekken(raw: bytes, where: str) -> RankVocabulary:
    """Return what a tekken file holds; ValueError says what is wrong with it."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: no JSON ({error})") from None
    try:
        config = content["config"]
        num_special = int(config["default_num_special_tokens"])
        num_ranks = int(config["default_vocab_size"]) - num_special
        ranks = {
            base64.b64decode(entry["token_bytes"], validate=True): int(entry["rank"])
            for entry in content["vocab"][:num_ranks]
        }
        special = _tekken_special(content.get("special_tokens"), num_special)
        pattern = str(config["pattern"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{where}: no tekken file ({error!r})") from None
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    made = RankVocabulary(
        ranks=ranks,
        pattern=pattern,
        first_id=num_special,
        special_tokens=special,
        roles={role: name for role, name in roles.items() if name in special},
    )
    if len(ranks) != num_ranks:
        raise ValueError(
            f"{where}: {len(ranks)} different tokens where its config says {num_ranks}"
        )
    made.check(where)
    return made


def _tekken_special(listed: Any, count: int) -> dict[str, int]:
    """Return all `count` special tokens: those listed, and fillers for the other ids."""
    if listed is None:
        listed = [{"rank": i, "token_str": name} for i, name in enumerate(_TEKKEN_SPECIAL)]
    found = {str(entry["token_str"]): int(entry["rank"]) for entry in listed}
    for i in set(range(count)) - set(found.values()):
        found[f"<SPECIAL_{i}>"] = i
    if sorted(found.values()) != list(range(count)):
        raise ValueError(f"special tokens do not have the ids 0 to {count - 1}")
    return found
