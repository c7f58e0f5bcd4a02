"""Environments by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

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

    `name` is one of `ENVIRONMENTS`, or says where to import one of your own from, as
    `package.module:Class`.

    Raises:
        ValueError: an unknown name or option; names the nearest valid one.
    """
    kind = _imported(name) if ":" in name else ENVIRONMENTS.get(name)
    if kind is None:
        close = difflib.get_close_matches(name, ENVIRONMENTS, n=1, cutoff=0.0)[0]
        raise ValueError(f"no environment {name!r}: did you mean {close!r}?")
    _check_names(name, kind, options)
    try:
        return kind(**options)
    except TypeError as error:
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise ValueError(f"{name}({given}): {error}") from None


def _check_names(name: str, kind: Callable[..., Environment], options: Mapping[str, Any]) -> None:
    taken = inspect.signature(kind).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        return
    names = [
        parameter.name for parameter in taken if parameter.kind is not parameter.VAR_POSITIONAL
    ]
    for option in options:
        if option not in names:
            close = difflib.get_close_matches(str(option), names, n=1, cutoff=0.0)
            advice = f"did you mean {close[0]!r}?" if close else "it takes none"
            raise ValueError(f"{name} has no option {option!r}: {advice}")


def _imported(name: str) -> Callable[..., Environment]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        file = Path(*module.split(".")).with_suffix(".py")
        unseen = error.name == module.partition(".")[0] and file.is_file()
        advice = f", but there is {file}: run with PYTHONPATH=." if unseen else ""
        raise ValueError(f"environment {name!r}: {error}{advice}") from None
    if not callable(found):
        raise ValueError(f"environment {name!r}: {module} has no class {attribute!r}")
    return cast(Callable[..., Environment], found)
