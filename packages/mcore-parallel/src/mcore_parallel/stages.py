"""Which decoder layers each pipeline stage holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_parallel.pipeline.actions import Line

_PART = re.compile(r"([EtmL|])|\(|\)|\*(\d+)|[\s,]+")
_LONGEST = 1_000_000  # letters of an expanded layout


def stage_layers(
    num_layers: int,
    pp: int,
    counts: Sequence[int] | None = None,
    *,
    chunks: int = 1,
    zigzag: bool = False,
    first: int | None = None,
    last: int | None = None,
    count_embedding: bool = False,
    count_loss: bool = False,
) -> list[range]:
    """Return the global layer ids of each virtual stage, in execution order 0 … num_layers-1.

    Each of `pp` stages holds `chunks` chunks of layers: the entries `Line.position(stage, chunk)`
    of the result (`mcore_parallel.pipeline`), without `zigzag` number chunk · pp + stage.

    Without further arguments the layers are spread as evenly as possible, the first entries larger.
    `counts` gives the number for every entry (0 for one that holds only the embedding or the head,
    or nothing). `first` and `last` give those of the first and the last stage, all chunks together;
    the others share the rest. `count_embedding` and `count_loss` count the embedding and the loss
    as a layer each, so that the entry that holds it gets one layer less.

    ValueError, with the numbers and valid ones, when the layers are not covered exactly, or when
    there are fewer than entries and no counts say which are empty.
    """
    if pp < 1 or chunks < 1 or num_layers < 0:
        raise ValueError(
            f"{num_layers} layers over {pp} pipeline stages of {chunks} chunks: need 0 or more "
            f"over 1 or more"
        )
    ways = {
        "stage_layers": counts is not None,
        "first and last": first is not None or last is not None,
        "counting embedding or loss as layers": count_embedding or count_loss,
    }
    asked = [way for way, given in ways.items() if given]
    if len(asked) > 1:
        raise ValueError(f"layers are placed in one way: {' or '.join(asked)}, not both")
    if counts is not None:
        counts = _checked(counts, num_layers, pp, chunks)
    elif first is not None or last is not None:
        line = Line(num_stages=pp, num_chunks=chunks, zigzag=zigzag)
        counts = _with_ends(num_layers, line, first, last)
    else:
        counts = _spread(num_layers, pp, chunks, count_embedding, count_loss)
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """What each virtual stage holds, in the letters of the reference's layout string.

    stages: a string for each, such as "Ett": E the embedding, t a decoder layer, m a
    multi-token-prediction layer, L the loss; empty where a stage holds nothing.
    """

    stages: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> StageLayout:
        """Read a layout such as "Et*3|(tt|)*29,m|L".

        `|` ends a stage, `*N` repeats the letter or parenthesis before it, blanks and commas mean
        nothing. ValueError names the place: E comes first and L last, each once; m stands between
        the last t and L.
        """
        letters = _expand(text)
        flat = letters.replace("|", "")
        for letter, what, where in (("E", "embedding", "first"), ("L", "loss", "last")):
            if flat.count(letter) != 1:
                raise ValueError(
                    f"layout {text!r} has {flat.count(letter)} {letter} ({what}), not 1"
                )
            if flat[0 if where == "first" else -1] != letter:
                raise ValueError(f"layout {text!r}: {letter} ({what}) must come {where}")
        if "mt" in flat:
            number = flat[: flat.index("mt")].count("t") + 1
            raise ValueError(
                f"layout {text!r}: t (decoder layer) number {number} comes after "
                f"m (prediction layer); put m after the last t"
            )
        return StageLayout(stages=tuple(letters.split("|")))

    @property
    def layers(self) -> tuple[int, ...]:
        """The number of decoder layers of each virtual stage: `counts` of `stage_layers`."""
        return tuple(stage.count("t") for stage in self.stages)

    @property
    def predictions(self) -> tuple[int, ...]:
        """The number of multi-token-prediction layers of each virtual stage."""
        return tuple(stage.count("m") for stage in self.stages)

    def __str__(self) -> str:
        text = "|".join(self.stages)
        return re.sub(r"t{3,}", lambda run: f"t*{len(run[0])}", text)


def _expand(text: str) -> str:
    """Write out repetitions: the letters of all stages, joined by bars."""
    stack: list[list[str]] = [[]]
    at = 0
    while at < len(text):
        match = _PART.match(text, at)
        if match is None:
            raise ValueError(
                f"layout {text!r}, character {at}: {text[at]!r} is none of E t m L | ( ) *N"
            )
        token, count = match[0], match[2]
        if match[1]:
            stack[-1].append(token)
        elif token == "(":
            stack.append([])
        elif token == ")":
            if len(stack) == 1:
                raise ValueError(f"layout {text!r}, character {at}: ) closes nothing")
            group = "".join(stack.pop())
            stack[-1].append(group)
        elif count is not None:
            if not stack[-1]:
                raise ValueError(f"layout {text!r}, character {at}: {token} repeats nothing")
            if len(stack[-1][-1]) * int(count) > _LONGEST:
                raise ValueError(f"layout {text!r}, character {at}: more than {_LONGEST} layers")
            stack[-1][-1] *= int(count)
        at = match.end()
    if len(stack) > 1:
        raise ValueError(f"layout {text!r}: {len(stack) - 1} ( without )")
    return "".join(stack[0])


def _checked(counts: Sequence[int], num_layers: int, pp: int, chunks: int) -> list[int]:
    counts = list(counts)
    if len(counts) != pp * chunks:
        of = f" of {chunks} chunks each, {pp * chunks} in all" if chunks > 1 else ""
        raise ValueError(
            f"stage_layers {counts} has {len(counts)} counts for pp = {pp} pipeline stages{of}"
        )
    if min(counts) < 0:
        raise ValueError(f"stage_layers {counts}: a stage cannot hold {min(counts)} layers")
    if sum(counts) != num_layers:
        raise ValueError(
            f"stage_layers {counts} sum to {sum(counts)}, not to {num_layers} layers; "
            f"an even split is {_even(num_layers, pp * chunks)}"
        )
    return counts


def _spread(num_layers: int, pp: int, chunks: int, embedding: bool, loss: bool) -> list[int]:
    size = pp * chunks
    total = num_layers + embedding + loss
    if total < size:
        counted = " (with embedding and loss counted)" if embedding or loss else ""
        if chunks > 1:
            raise ValueError(
                f"{total} layers{counted} are fewer than pp × chunks = {pp} × {chunks} = {size} "
                f"virtual stages; use chunks ≤ {max(total // pp, 1)} or give stage_layers with "
                f"zeros for those without layers"
            )
        raise ValueError(
            f"{total} layers{counted} are fewer than pp = {pp} pipeline stages; use pp ≤ "
            f"{max(total, 1)} or give stage_layers with zeros for stages without layers"
        )
    counts = _even(total, size)
    counts[0] -= embedding
    counts[-1] -= loss
    if min(counts) < 0:  # one stage, counted twice
        raise ValueError(f"{num_layers} layers do not fill {size} stages beside embedding and loss")
    return counts


def _with_ends(num_layers: int, line: Line, first: int | None, last: int | None) -> list[int]:
    pp, chunks = line.num_stages, line.num_chunks
    given = {0: first} if first is not None else {}
    if last is not None:
        if pp == 1 and first is not None:
            raise ValueError(f"one stage cannot hold first = {first} and last = {last} layers")
        given[pp - 1] = last
    asked = " and ".join(
        f"{name} = {count}"
        for name, count in (("first", first), ("last", last))
        if count is not None
    )
    rest, others = num_layers - sum(given.values()), pp - len(given)
    if min(given.values()) < 0 or rest < others * chunks or (others == 0 and rest):
        between = (
            f"leaves {rest} of {num_layers} layers for {others} other stages of {chunks} chunks"
            if others
            else f"must place all {num_layers} layers"
        )
        fitting = num_layers - others * chunks
        raise ValueError(
            f"{asked} {between}; together they can be {'0 to ' if others else ''}{max(fitting, 0)}"
        )
    counts = [0] * (pp * chunks)
    for stage, count in given.items():
        for chunk, part in enumerate(_even(count, chunks)):
            counts[line.position(stage, chunk)] = part
    free = [i for i in range(pp * chunks) if line.place(i)[0] not in given]
    for position, part in zip(free, _even(rest, len(free)), strict=True):
        counts[position] = part
    return counts


def _even(num_layers: int, size: int) -> list[int]:
    if not size:
        return []
    even, larger = divmod(num_layers, size)
    return [even + 1] * larger + [even] * (size - larger)
