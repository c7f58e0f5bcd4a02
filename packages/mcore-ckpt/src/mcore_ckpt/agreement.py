"""Doing something on every rank of a group and agreeing on whether it went well."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from mcore_ckpt.errors import CheckpointError
from mcore_parallel.collectives import all_gather_object
from mcore_parallel.group import Group


def together(
    group: Group,
    what: str,
    local: Callable[[], Any],
    passing: Sequence[type[Exception]] = (ValueError,),
) -> list[Any]:
    """Run `local` on every rank and return all results in group order.

    Results must be JSON-able: they travel as text over the group's CPU twin. When `local` fails
    anywhere, every rank raises, so that none is left waiting in a later collective.

    Raises:
        an exception of a type in `passing`: some rank raised one (on that rank the original).
        CheckpointError: some rank raised anything else; says `what`, then where and why.
    """
    own: Exception | None = None
    row: dict[str, Any] = {}
    try:
        row["result"] = local()
    except Exception as error:  # whatever it is, the others have to hear of it
        own = error
        kinds = [i for i, kind in enumerate(passing) if isinstance(error, kind)]
        row = {"error": str(error) or repr(error), "kind": kinds[0] if kinds else None}
    rows = [json.loads(text) for text in all_gather_object(json.dumps(row), group)]
    for rank, other in enumerate(rows):
        if "error" in other:
            where = f"rank {rank} of {group.size}: " if group.size > 1 else ""
            if other["kind"] is not None:
                if own is not None and row["kind"] is not None:
                    raise own
                kind = passing[int(other["kind"])]
                raise kind(where + other["error"]) from own
            raise CheckpointError(f"{what}: {where}{other['error']}") from own
    return [other["result"] for other in rows]
