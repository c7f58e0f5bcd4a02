"""Reading once what several ranks want alike, and passing it on between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_ckpt.agreement import together
from mcore_ckpt.alike import digest_of, split
from mcore_ckpt.live import LiveTransfer
from mcore_ckpt.planning import describe
from mcore_parallel.group import Group
from mcore_parallel.layout import Fragment, LayoutTensor, TensorLayout


@dataclass(frozen=True, kw_only=True)
class Twins:
    """The ranks that want the same as this one, itself among them.

    digest: of what they want. place: where this rank stands among them.
    """

    digest: str
    place: int
    count: int

    @staticmethod
    def of(tensors: Mapping[str, LayoutTensor], group: Group, what: str) -> Twins:
        """Find them; every rank of the group calls it. Metadata crosses the group's CPU twin."""
        digests = together(group.cpu, what, lambda: digest_of(split(describe(tensors))[0]))
        own = digests[group.rank]
        ranks = [rank for rank, digest in enumerate(digests) if digest == own]
        return Twins(digest=own, place=ranks.index(group.rank), count=len(ranks))

    def name(self, tensor: str) -> str:
        """Return a name for a global tensor that only they use."""
        return f"{self.digest}/{tensor}"

    def readers(self, sizes: Sequence[int]) -> list[int]:
        """Return which of them reads each of some chunks, so that all read about as much.

        sizes: of the chunks, in bytes, the same on each.
        """
        load = [0] * self.count
        readers = []
        for size in sizes:
            reader = load.index(min(load))
            load[reader] += size
            readers.append(reader)
        return readers


def pass_on(
    tensors: Mapping[str, LayoutTensor],
    parts: Mapping[str, Sequence[tuple[Fragment, int]]],
    twins: Twins,
    group: Group,
    *,
    verify: bool,
) -> None:
    """Give the others what this rank has read, and take from them what they have.

    Every rank of the group calls it. parts: by local key, the parts of the tensor and who of the
    twins has read each. verify: compare what arrives with checksums.

    Raises:
        CheckpointError: on every rank: what arrived is not what was sent.
        RuntimeError: the transport failed.
    """
    ends: tuple[dict[str, LayoutTensor], dict[str, LayoutTensor]] = ({}, {})
    for key, some in parts.items():
        value = tensors[key]
        divided: dict[bool, list[Fragment]] = defaultdict(list)
        for fragment, reader in some:
            divided[reader == twins.place].append(fragment)
        for read, held in zip((True, False), ends, strict=True):
            if divided[read]:
                layout = TensorLayout(shape=value.layout.shape, fragments=tuple(divided[read]))
                # Other ranks may want the same in another dtype: it is not theirs to give.
                held[key] = LayoutTensor(value.tensor.detach(), layout.renamed(twins.name))
    link = LiveTransfer(*ends, group)
    try:
        link(verify=verify)
    finally:
        link.close()
