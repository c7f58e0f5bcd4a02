"""Attention in tiles that lie at fixed positions of a segment.

A query's result then depends on its position and on the keys it sees, and on nothing else: not on
the other segments, and not on whether its segment came whole (training), in parts (chunks of a
prompt) or token by token (decoding). Keys are taken tile after tile from the first, with the
running maximum of Milakov and Gimelshein 2018 (arXiv:1805.02867).

Shapes: B segments, lq and lk queries and keys of each, K kv heads, G query heads of each, D and Dv
head sizes; a tile is QUERIES × KEYS.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_kernels.ops.attention.base import Visibility
from mcore_kernels.ops.attention.packed import PackedAttention
from mcore_kernels.protocols import accumulation_dtype

QUERIES, KEYS = 32, 64


class InvariantAttention(PackedAttention):
    """Memory: one tile of scores; time: a few small products for each."""

    def forward_block(
        self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility
    ) -> tuple[Tensor, Tensor]:
        """See `PackedAttention`."""
        wide = accumulation_dtype(q.dtype)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=wide)
        for b in range(q.shape[0]):
            keys, values = _tiled(k[b], 0, KEYS), _tiled(v[b], 0, KEYS)
            for rows, places, tile in _query_tiles(q[b], k.shape[1], k.shape[2]):
                top = tile.new_full(tile.shape[:3], -torch.inf)
                total, sums = torch.zeros_like(top), tile.new_zeros(*tile.shape[:3], v.shape[3])
                for key, value, hidden in _key_tiles(keys, values, places, visibility, k.shape[1]):
                    scores = _scores(tile, key, hidden, visibility)
                    new = torch.maximum(top, scores.amax(-1))
                    base = torch.where(new == -torch.inf, 0.0, new)
                    shrink, p = (top - base).exp(), (scores - base.unsqueeze(-1)).exp()
                    total = total * shrink + p.sum(-1)
                    sums = sums * shrink.unsqueeze(-1) + p @ value
                    top = new
                of_tile = (top + total.log()).flatten(0, 1).t()
                lse[b, rows] = of_tile[places.kept]
                result = (sums / total.unsqueeze(-1)).flatten(0, 1).transpose(0, 1)
                out[b, rows] = result[places.kept].to(q.dtype)
        return out, lse

    def backward_block(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        visibility: Visibility,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `PackedAttention`."""
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        groups = k.shape[2]
        for b in range(q.shape[0]):
            keys, values = _tiled(k[b], 0, KEYS), _tiled(v[b], 0, KEYS)
            dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
            others = [
                _query_tiles(x[b], k.shape[1], groups) for x in (grad_out, out, lse.unsqueeze(-1))
            ]
            tiles = zip(_query_tiles(q[b], k.shape[1], groups), *others, strict=True)
            for (rows, places, tile), (*_, dout), (*_, result), (*_, base) in tiles:
                delta = (dout * result).sum(-1, keepdim=True)
                dtile = torch.zeros_like(tile)
                found = _key_tiles(keys, values, places, visibility, k.shape[1])
                for key, value, hidden in found:
                    at = hidden.first // KEYS
                    scores = _scores(tile, key, hidden, visibility)
                    p = (scores - base).exp()
                    dvalues[at] += (p.transpose(-1, -2) @ dout).sum(1, keepdim=True)
                    ds = (dout @ value.transpose(-1, -2) - delta) * p * visibility.scale
                    if visibility.softcap is not None:
                        slope = 1.0 - (scores / visibility.softcap).square()
                        ds = torch.where(scores == -torch.inf, 0.0, ds * slope)
                    dtile += ds @ key
                    dkeys[at] += (ds.transpose(-1, -2) @ tile).sum(1, keepdim=True)
                dq[b, rows] = dtile.flatten(0, 1).transpose(0, 1)[places.kept].to(q.dtype)
            dk[b] = _untiled(dkeys, k.shape[1]).to(k.dtype)
            dv[b] = _untiled(dvalues, v.shape[1]).to(v.dtype)
        return dq, dk, dv


class _Places:
    """The positions of a tile's rows among the keys, and which rows hold a query."""

    def __init__(self, first: int, start: int, stop: int, device: torch.device) -> None:
        self.first = first
        self.kept = slice(start - first, stop - first)
        self.position = torch.arange(first, first + QUERIES, device=device).unsqueeze(1)
        self.empty = (self.position < start) | (self.position >= stop)


class _Hidden:
    """Which pairs of a tile are out of sight, and the position of its first key."""

    def __init__(self, mask: Tensor, first: int) -> None:
        self.mask, self.first = mask, first


def _tiled(x: Tensor, before: int, size: int) -> Tensor:
    """x [l, K, D] behind `before` zeros, as tiles [n, K, 1, size, D] in the accumulation dtype."""
    x = x.to(accumulation_dtype(x.dtype))
    x = F.pad(x, (0, 0, 0, 0, before, -(before + x.shape[0]) % size))
    return x.view(-1, size, *x.shape[1:]).transpose(1, 2).unsqueeze(2).contiguous()


def _untiled(x: Tensor, length: int) -> Tensor:
    return x.squeeze(2).transpose(1, 2).flatten(0, 1)[:length]


def _query_tiles(x: Tensor, lk: int, groups: int) -> Iterator[tuple[slice, _Places, Tensor]]:
    """The rows [lq, Q, D] of each tile, where they lie, and the tile [K, G, QUERIES, D]."""
    lq = x.shape[0]
    start = lk - lq
    before = start % QUERIES
    tiles = _tiled(x, before, QUERIES).squeeze(2)
    for i, tile in enumerate(tiles):
        first = start - before + i * QUERIES
        a, b = max(first, start), min(first + QUERIES, lk)
        places = _Places(first, a, b, x.device)
        yield slice(a - start, b - start), places, tile.unflatten(0, (groups, -1))


def _key_tiles(
    keys: Tensor, values: Tensor, places: _Places, visibility: Visibility, lk: int
) -> Iterator[tuple[Tensor, Tensor, _Hidden]]:
    """Tiles of keys and values that a tile of queries may see: tiles out of sight add nothing."""
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        first = i * KEYS
        if visibility.causal and first >= places.first + QUERIES:
            break
        if visibility.window is not None and first + KEYS <= places.first - visibility.window + 1:
            continue
        at = torch.arange(first, first + KEYS, device=key.device)
        mask = places.empty | (at >= lk)
        if visibility.causal:
            mask = mask | (at > places.position)
        if visibility.window is not None:
            mask = mask | (at <= places.position - visibility.window)
            if not visibility.causal:
                mask = mask | (at >= places.position + visibility.window)
        yield key, value, _Hidden(mask, first)


def _scores(q: Tensor, k: Tensor, hidden: _Hidden, visibility: Visibility) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) * visibility.scale
    if visibility.softcap is not None:
        scores = (scores / visibility.softcap).tanh() * visibility.softcap
    return scores.masked_fill(hidden.mask, -torch.inf)


INVARIANT = InvariantAttention()
"""The operator; it holds no state."""
