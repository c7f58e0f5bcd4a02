"""How the next token is chosen.

N sequences, V vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.ops.sample.reference import probabilities
from mcore_kernels.ops.sample.reference import sample as plain_sample
from mcore_kernels.protocols import SampleOp
from mcore_parallel import RngKey

Tops = list[tuple[tuple[int, float], ...]]
"""For each of several places, the most probable tokens with their log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a request asks of sampling.

    Attributes:
        max_tokens: how many tokens to generate at most.
        temperature: what logits are divided by; 0 takes the most probable token.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: of what `top_k` keeps, keep the fewest most probable tokens that together have at
            least this probability; 1 keeps all.
        seed: the random number for a token is a function of the seed and of how many tokens were
            generated before it, so that a sample does not depend on what else is in the batch.
            Several samples of one prompt need several seeds: `n` makes them.
        stop_token_ids: tokens that end the text, besides the tokenizer's own.
        ignore_eos: go on past the tokenizer's end token.
        stop: strings that end the text, wherever tokens begin and end; they do not belong to it.
        n: how many samples to draw of the prompt, see `each`.
        top_logprobs: how many of the most probable tokens to report at each place, with their
            log-probabilities under the model itself.
        prompt_logprobs: report the log-probabilities of the prompt's own tokens as well.

    Raises:
        ValueError: a value is out of range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    n: int = 1
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 0), ("top_k", 0), ("n", 1), ("top_logprobs", 0)):
            value = getattr(self, name)
            if not _is_whole(value) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
        if not _is_whole(self.seed):
            raise ValueError(f"seed={self.seed!r} must be a whole number")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if not isinstance(value, int | float):
                raise ValueError(f"{name}={value!r} must be a number")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be finite and at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in 0 < top_p <= 1")
        ids = _row("stop_token_ids", self.stop_token_ids)
        if not all(_is_whole(token) and token >= 0 for token in ids):
            raise ValueError(f"stop_token_ids={ids!r} must be whole numbers of at least 0")
        object.__setattr__(self, "stop_token_ids", ids)
        stop = (self.stop,) if isinstance(self.stop, str) else _row("stop", self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop={stop!r} must be strings of at least one character")
        object.__setattr__(self, "stop", stop)

    def each(self) -> tuple[SamplingParams, ...]:
        """Return the parameters of each of the `n` samples; the first has this seed itself."""
        if self.n == 1:
            return (self,)
        seeds = [
            RngKey(self.seed).fold("choice", i).seed if i else self.seed for i in range(self.n)
        ]
        return tuple(replace(self, n=1, seed=seed) for seed in seeds)


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Return the next token [N] int64 of each row of logits [N, V]; arguments as in `draw`."""
    return draw(logits, params, positions)[0]


def draw(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    op: SampleOp = plain_sample,
) -> tuple[Tensor, Tensor]:
    """Return the next token of each row of logits, and how probable the draw was.

    Args:
        logits: [N, V], real vocabulary only.
        params: one per row.
        positions: the number of tokens generated before by each row.
        op: what draws (`Kernels(…).sample`).

    Returns:
        The tokens [N] int64, and ln p [N] float32 of each in the distribution that it was drawn
        from (`allowed_probabilities`): 0 where temperature 0 leaves no choice.

    Raises:
        ValueError: logits to draw by have a NaN, or nothing above -inf.
    """
    chosen = greedy(logits)
    certainty = torch.zeros(len(chosen), dtype=torch.float32, device=logits.device)
    for rows in _kinds(params, [row for row, param in enumerate(params) if param.temperature > 0]):
        u = [_uniform(params[row].seed, positions[row]) for row in rows]
        uniform = torch.tensor(u, dtype=torch.float64, device=logits.device)
        numbers = _numbers([params[row] for row in rows], logits.device)
        chosen[rows], certainty[rows] = op(logits[rows], uniform, **numbers)
    if certainty.isnan().any():
        row = int(certainty.isnan().nonzero()[0])
        raise ValueError(
            f"row {row} of the logits has a NaN, or nothing above -inf: nothing to draw"
        )
    return chosen, certainty


def greedy(logits: Tensor) -> Tensor:
    """Return the most probable token [N] of each row of [N, V]; ties go to the lowest id."""
    return logits.argmax(-1)


def allowed_probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the distributions [N, V] (float64) that `params`, one per row of logits, sample from.

    Temperature first, then top-k, then top-p on what is left, then scaled to sum 1. Ties at an edge
    go to the lowest ids, so that exactly k tokens stay.
    """
    logits = logits.detach()
    p = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    for rows in _kinds(params, range(len(params))):
        numbers = _numbers([params[row] for row in rows], logits.device)
        p[rows] = probabilities(logits[rows], **numbers)
    return p


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return ln p [N] of `tokens` [N] under the softmax of logits [N, V], in float32."""
    logits = logits.float()
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def top_log_probabilities(logits: Tensor, k: int, *, among: int | None = None) -> Tops:
    """Return the k most probable tokens of each row of logits [N, V], best first.

    Their log-probabilities are those of the whole row; with `among`, only the first so many tokens
    are considered. Ties go to the lowest ids, as they do where the most probable token is taken.
    """
    if not k or not len(logits):
        return [()] * len(logits)
    total = logits.float().logsumexp(-1)
    known = logits[:, :among].float()
    # topk takes any of those that tie for the last place: so all that reach it, and sort.
    least = known.topk(min(k, known.shape[-1])).values[:, -1:]
    rows, ids = (known >= least).nonzero(as_tuple=True)
    found: list[list[tuple[int, float]]] = [[] for _ in range(len(logits))]
    columns = (rows.tolist(), ids.tolist(), (known[rows, ids] - total[rows]).tolist())
    for row, token, logprob in zip(*columns, strict=True):
        found[row].append((token, logprob))
    return [tuple(sorted(row, key=lambda pair: (-pair[1], pair[0]))[:k]) for row in found]


def _kinds(params: Sequence[SamplingParams], rows: Iterable[int]) -> list[list[int]]:
    """The rows of which nothing is cut off, and the others, unless there are none.

    Not all at once, since sorting costs, and a cut of one row would round the others differently.
    """
    kinds: tuple[list[int], list[int]] = [], []
    for row in rows:
        kinds[_is_cut(params[row])].append(row)
    return [kind for kind in kinds if kind]


def _is_cut(params: SamplingParams) -> bool:
    return bool(params.top_k) or params.top_p < 1


def _numbers(params: Sequence[SamplingParams], device: torch.device) -> dict[str, Tensor]:
    """The arguments of a `SampleOp` for rows of one kind."""
    wide = torch.float64
    numbers = {
        "temperature": torch.tensor(
            [param.temperature for param in params], dtype=wide, device=device
        )
    }
    if _is_cut(params[0]):
        numbers["top_k"] = torch.tensor([param.top_k for param in params], device=device)
        numbers["top_p"] = torch.tensor(
            [param.top_p for param in params], dtype=wide, device=device
        )
    return numbers


def _uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1): the upper 53 of the 64 bits that the key consists of."""
    return float((RngKey(seed).fold("sample", position).seed >> 11) * 2.0**-53)


def _row(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r} must be a list")
    return tuple(values)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
