"""The global gradient norm, clipping, and the search for values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel.collectives import all_gather_object, all_reduce
from mcore_parallel.data.ddp import GradientBuckets
from mcore_parallel.data.share import Piece, Share, grads_of

_STRETCH = 1 << 16


def counted_views(share: Share) -> list[Tensor]:
    """Return views of this rank's gradients that together count, over all ranks, everything once.

    Only first replicas count, and no padding. Neighbours are joined where all of both counts (what
    lies between them is zero), so that there are few.
    """
    views: list[Tensor] = []
    start = stop = share.owned[0]
    for piece in sorted(share.pieces, key=lambda piece: piece.at):
        layout = piece.layout.primary()
        if layout.covered == layout.numel:
            stop = piece.end
            continue
        views.append(grads_of(share, start, stop))
        views += (view for _, view in layout.views(grads_of(share, piece.at, piece.end)))
        start = stop = piece.end
    views.append(grads_of(share, start, stop))
    return [view for view in views if view.numel()]


def copies_of_counted(share: Share) -> list[Tensor]:
    """Return views of this rank's gradients that hold something which another rank counts."""
    layouts = ((piece, piece.layout.primary()) for piece in share.pieces)
    others = [piece for piece, layout in layouts if layout.covered < layout.numel]
    return [grads_of(share, piece.at, piece.end) for piece in others]


def global_norm(
    views: Iterable[Tensor], buckets: GradientBuckets, *, copies: Iterable[Tensor] = ()
) -> float:
    """Return the 2-norm over the elements of all ranks' views: one number, equal on every rank.

    It is not finite, too, where `copies` are not, which otherwise count for nothing.
    Summed in fp64, on GPUs over norms of stretches taken in fp32: there fp64 is slow. Should one of
    these overflow, all is summed again in fp64. Communicates over mesh.world.
    """
    views, copies, mesh = list(views), list(copies), buckets.mesh
    squares = _squares_by_stretch if mesh.device.type == "cuda" else _squares
    norm = float(all_reduce(_total(views, copies, squares, mesh.device), mesh.world).sqrt())
    if math.isfinite(norm) or squares is _squares:
        return norm
    return float(all_reduce(_total(views, copies, _squares, mesh.device), mesh.world).sqrt())


def _total(
    views: list[Tensor],
    copies: list[Tensor],
    squares: Callable[[Tensor], Tensor],
    device: torch.device,
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for view in views:
        total += squares(view)
    for copy in copies:
        total += squares(copy) * 0.0  # NaN where it is not finite
    return total


def _squares(view: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(view, dtype=torch.float64)
    return norm.square()


def _squares_by_stretch(view: Tensor) -> Tensor:
    whole = view.numel() // _STRETCH * _STRETCH
    if not view.is_contiguous() or not whole:
        return _squares(view)
    flat = view.view(-1)
    norms: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, _STRETCH), dim=1)
    return norms.double().square().sum() + _squares(flat[whole:])


def clip_factor(norm: float, max_norm: float) -> float:
    """Return by what to multiply gradients of this norm so that it is at most `max_norm`."""
    if not max_norm > 0.0:
        raise ValueError(f"the largest gradient norm must be positive, not {max_norm}")
    return min(1.0, max_norm / norm) if norm > 0.0 else 1.0


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """The first tensor with values that are not finite.

    name: its global name. rank: the torch.distributed rank that found it. count: how many such
    values are in that rank's part of it, of numel in all.
    """

    name: str
    rank: int
    count: int
    numel: int

    def __str__(self) -> str:
        return f"{self.name}: {self.count} of {self.numel} values on rank {self.rank} not finite"


def first_nonfinite(buckets: GradientBuckets) -> NonFinite | None:
    """Return the first gradient in the order of pipeline stages, then of registration; or None.

    Equal on every rank. Communicates over mesh.world.
    """
    mesh = buckets.mesh
    pieces = [(share, piece) for share in buckets.shares for piece in share.pieces]
    found: tuple[tuple[int, int, int, int], NonFinite] | None = None
    for share, piece in sorted(pieces, key=lambda entry: entry[1].slot.index):
        if torch.isfinite(grads_of(share, piece.at, piece.end)).all():
            continue
        place = mesh.pp.rank, piece.slot.index, piece.start, mesh.world.rank
        found = place, _describe(share, piece, mesh.world.ranks[mesh.world.rank])
        break
    everywhere = [entry for entry in all_gather_object(found, mesh.world) if entry is not None]
    return min(everywhere, key=lambda entry: entry[0])[1] if everywhere else None


def _describe(share: Share, piece: Piece, rank: int) -> NonFinite:
    grads = grads_of(share, piece.at, piece.end)
    for fragment, view in piece.layout.views(grads):
        bad = int((~torch.isfinite(view)).sum())
        if bad:
            return NonFinite(name=fragment.name, rank=rank, count=bad, numel=view.numel())
    bad = int((~torch.isfinite(grads)).sum())
    return NonFinite(name=f"{piece.slot.name} (padding)", rank=rank, count=bad, numel=grads.numel())
