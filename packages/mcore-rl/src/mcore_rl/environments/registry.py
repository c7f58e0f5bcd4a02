"""Environments by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from mcore_rl.environments.base import Environment
from mcore_rl.environments.chain_sum import ChainSum
from mcore_rl.environments.count_on import CountOn
from mcore_rl.environments.guess_number import GuessNumber

ENVIRONMENTS: Mapping[str, Callable[..., Environment]] = {
    ChainSum.name: ChainSum,
    CountOn.name: CountOn,
    GuessNumber.name: GuessNumber,
}


def make_environment(name: str, **options: Any) -> Environment:
    """Return a new environment.

    Raises:
        ValueError: an unknown name or option; names the nearest valid one.
    """
    if name not in ENVIRONMENTS:
        close = difflib.get_close_matches(name, ENVIRONMENTS, n=1, cutoff=0.0)[0]
        raise ValueError(f"no environment {name!r}: did you mean {close!r}?")
    try:
        return ENVIRONMENTS[name](**options)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None
