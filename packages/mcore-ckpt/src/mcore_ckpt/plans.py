"""Plans of earlier saves, for saves of the same tensors under the same layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_ckpt.agreement import together
from mcore_ckpt.alike import Runs, grouped
from mcore_ckpt.codecs import Codec
from mcore_ckpt.planning import WritePlan, plan_save
from mcore_parallel.group import Group


class Plans:
    """The plan of the last save, used again while all ranks hold what they held then.

    Ranks then tell each other a digest instead of all layouts, and plan nothing: in the background
    that would take the interpreter away from the training.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._plan: WritePlan | None = None

    def plan(
        self,
        description: Mapping[str, Any],
        digests: Sequence[str],
        replicas: Sequence[Sequence[Runs]],
        group: Group,
        what: str,
        *,
        chunk_bytes: int,
        exchange_bytes: int,
        codec: Codec | None = None,
        file_bytes: int | None = None,
    ) -> WritePlan:
        """Return the plan of a save of what the ranks describe, this one's being `description`.

        description, digests, replicas: what `split` makes of it, and of all ranks the digests of
        the former and the latter. Every rank calls it with the same ones, and has made the same
        calls before; errors as `plan_save`. Communicates over the group's CPU twin unless the plan
        is known: of ranks with the same digest the first one describes.
        """
        key = (
            tuple(digests),
            json.dumps(replicas),
            group.ranks,
            chunk_bytes,
            exchange_bytes,
            codec,
            file_bytes,
        )
        if self._plan is None or key != self._key:
            self._plan = None
            first = digests.index(digests[group.rank]) == group.rank
            described = together(group, what, lambda: description if first else None)
            self._plan = plan_save(
                grouped(described, digests, replicas),
                group.ranks,
                chunk_bytes=chunk_bytes,
                exchange_bytes=exchange_bytes,
                codec=codec,
                file_bytes=file_bytes,
            )
            self._key = key
        return self._plan
