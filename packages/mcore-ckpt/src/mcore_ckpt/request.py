"""What the ranks ask to be saved, checked on each and compared between all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from mcore_ckpt.codecs import Codec
from mcore_ckpt.manifest import Json, check_json
from mcore_parallel.collectives import all_gather_object
from mcore_parallel.group import Group


def make_request(
    *,
    step: int,
    keep_last: int | None,
    keep_every: int | None,
    chunk_bytes: int,
    exchange_bytes: int,
    state: Mapping[str, Any],
    compression: str | None = None,
    file_bytes: int | None = None,
) -> dict[str, Any]:
    """Return what one rank tells the others before a save; ValueError when it cannot be saved."""
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"step {step!r} must be a whole number from 0 on")
    if not isinstance(state, Mapping):
        raise ValueError(f"state is a {type(state).__name__}; it is a mapping of names to values")
    check_retention(keep_last, keep_every)
    for name, value in (("chunk_bytes", chunk_bytes), ("exchange_bytes", exchange_bytes)):
        if value < 1:
            raise ValueError(f"{name} is {value}; nearest valid: 1")
    if file_bytes is not None and file_bytes < 1:
        raise ValueError(f"file_bytes is {file_bytes}; nearest valid: 1 (or None: one chunk each)")
    if compression is not None:
        Codec.parse(compression)
    return {
        "step": step,
        "chunk_bytes": chunk_bytes,
        "exchange_bytes": exchange_bytes,
        "compression": compression,
        "file_bytes": file_bytes,
        "state": _digest(check_json(state)),
    }


def check_retention(keep_last: int | None, keep_every: int | None) -> None:
    """Raise ValueError when these do not say what to keep."""
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; nearest valid: 1 (or None to keep all)")


def check_same(requests: list[dict[str, Any]], state: Mapping[str, Any], group: Group) -> None:
    """Raise ValueError on every rank when ranks ask for different things; names the first."""
    first = requests[0]
    for key in ("step", "chunk_bytes", "exchange_bytes", "compression", "file_bytes", "copies"):
        for rank, other in enumerate(requests):
            if other.get(key) != first.get(key):
                raise ValueError(
                    f"{key} is {first[key]} on rank 0 but {other[key]} on rank {rank} "
                    f"of {group.size}"
                )
    if any(other["state"] != first["state"] for other in requests):
        leaves = dict(_leaves(check_json(state), "state"))
        everyone: list[dict[str, str]] = [
            json.loads(text) for text in all_gather_object(json.dumps(leaves), group)
        ]
        for rank, other in enumerate(everyone):
            for path in sorted(everyone[0].keys() | other.keys()):
                ours, theirs = everyone[0].get(path, "absent"), other.get(path, "absent")
                if ours != theirs:
                    raise ValueError(
                        f"{path} is {ours[:80]} on rank 0 but {theirs[:80]} on rank {rank} of "
                        f"{group.size}; state must be the same on every rank, since it is kept once"
                    )


def _digest(state: Json) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _leaves(value: Json, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, list) and value:
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{i}]")
    else:
        yield path, json.dumps(value)
