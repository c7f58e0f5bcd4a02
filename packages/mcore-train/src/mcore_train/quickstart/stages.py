"""Stages that are done once: a later call with the same inputs reuses them."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Stages:
    """A folder in which each finished stage leaves a note of its inputs and results.

    A stage is run again when its inputs, or those of a stage before it, have changed. A note is
    written after the stage's files, so that a stage cut short counts as not done.
    """

    folder: Path
    say: Callable[[str], None]

    def run(
        self,
        name: str,
        inputs: Mapping[str, Any],
        work: Callable[[], dict[str, Any]],
        describe: Callable[[dict[str, Any]], str],
        *,
        outputs: Sequence[Path] = (),
    ) -> dict[str, Any]:
        """Return the results of the stage `name` (JSON-able), doing `work` only where needed.

        A stage one of whose `outputs` has gone is done again.
        """
        note = self.folder / f"{name}.stage.json"
        digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
        stored = _read(note)
        there = all(path.exists() for path in outputs)
        if stored is not None and stored.get("inputs") == digest and there:
            results: dict[str, Any] = stored["results"]
            self.say(f"{name}: {describe(results)} (done before)")
            return results
        note.unlink(missing_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        results = work()
        temporary = note.with_suffix(".tmp")
        temporary.write_text(json.dumps({"inputs": digest, "results": results}, indent=1))
        os.replace(temporary, note)
        self.say(f"{name}: {describe(results)} ({time.perf_counter() - start:.0f} s)")
        return results


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    return value if isinstance(value, dict) else None
