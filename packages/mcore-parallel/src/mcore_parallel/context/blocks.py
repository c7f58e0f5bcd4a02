"""Which queries of a rank meet which keys, as calls of an `AttentionOp`.

An operator shows its queries everything, or what its masks show when queries and keys end together.
Blocks of other ranks' keys lie elsewhere, and need no more than that: keys before or after the
queries are seen by all of them or cut by one edge of the window, a triangle. The edge towards the
past is a causal triangle when queries and keys are taken in reversed order.

Positions count within a document, rows within the tensor that holds a rank's (or all) documents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mcore_parallel.protocols import AttentionGradOp
from mcore_parallel.torch_attention import accumulation_dtype

__all__ = ["Blocks", "Call", "Chunk", "Masking", "Merge", "Scores", "make_calls", "pieces"]

Form = Literal["full", "native", "later", "earlier"]
Piece = tuple[Form, range, range]


class Masking(NamedTuple):
    """What a query may see, as `AttentionOp` defines it."""

    causal: bool
    window: int | None

    def check(self) -> None:
        """Raise ValueError for a window that would hide a query's own key."""
        if self.window is not None and self.window < 1:
            raise ValueError(f"attention: window is {self.window}, must be at least 1 (or None)")


class Scores(NamedTuple):
    """What is made of the product of a query and a key, as `AttentionOp` defines it."""

    scale: float
    softcap: float | None


class Chunk(NamedTuple):
    """Positions of one document that lie one after another in rows, from `row` on."""

    positions: range
    row: int

    def rows(self, part: range) -> range:
        """The rows of some of the positions."""
        shift = self.row - self.positions.start
        return range(part.start + shift, part.stop + shift)


Blocks = Sequence[tuple[Sequence[Chunk], Sequence[Chunk]]]
"""For every document the chunks of queries and those of keys that meet."""


def pieces(q: range, k: range, masking: Masking) -> list[Piece]:
    """Cut what queries at positions `q` see of keys at positions `k` into operator calls.

    The keys end where the queries end, or all lie before them, or all after them; where everything
    is shown they may lie anywhere. In the result every visible pair occurs once. Forms: "full"
    shows everything, "native" is the operator's own masking, "later" a causal triangle, "earlier"
    one in reversed order.
    """
    causal, window = masking
    if not q or not k:
        return []
    if not causal and window is None:
        return [("full", q, k)]
    if k.stop == q.stop:
        if window is None:
            return [("native", q, k)]
        return [("native", q, range(max(k.start, q.start - window + 1), k.stop))]
    if k.stop <= q.start:
        return [("full", q, k)] if window is None else _earlier(q, k, window)
    assert k.start >= q.stop, f"queries at {q} and keys at {k} overlap"
    return [] if causal or window is None else _later(q, k, window)


def _earlier(q: range, k: range, window: int) -> list[Piece]:
    """Keys before the queries: query i sees those from i - window + 1 on."""
    k = range(max(k.start, q.start - window + 1), k.stop)
    edge = k.start + window - 1  # the last query that sees all of k
    found: list[Piece] = [
        ("full", range(q.start, min(edge, q.stop)), k),
        ("earlier", range(edge, min(q.stop, k.stop + window - 1)), k),
    ]
    return [piece for piece in found if piece[1] and piece[2]]


def _later(q: range, k: range, window: int) -> list[Piece]:
    """Keys after the queries: query i sees those up to i + window - 1."""
    k = range(k.start, min(k.stop, q.stop + window - 1))
    edge = k.stop - window  # the first query that sees all of k
    found: list[Piece] = [
        ("full", range(max(edge + 1, q.start), q.stop), k),
        ("later", range(max(q.start, k.start - window + 1), edge + 1), k),
    ]
    return [piece for piece in found if piece[1] and piece[2]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call of an operator: rows of queries and of keys (None: all of them), and its arguments.

    No row of queries occurs twice in it; a row of keys may.
    """

    q_rows: Tensor | None
    k_rows: Tensor | None
    arguments: dict[str, Any]

    def forward(
        self, op: AttentionGradOp, q: Tensor, k: Tensor, v: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of the rows of queries, from these keys alone."""
        picked = _pick(q, self.q_rows), _pick(k, self.k_rows), _pick(v, self.k_rows)
        return op(*picked, **self.arguments, scale=scores.scale, softcap=scores.softcap)

    def backward(
        self,
        op: AttentionGradOp,
        qkv: tuple[Tensor, Tensor, Tensor],
        of_out: tuple[Tensor, Tensor, Tensor],
        into: tuple[Tensor, Tensor, Tensor],
        scores: Scores,
    ) -> None:
        """Add this call's share of the gradients to `into` = (dq, dk, dv).

        `of_out` = (gradient, output, log-sum-exp), the last two merged over all keys.
        """
        q, k, v = qkv
        grad, out, lse = (_pick(x, self.q_rows) for x in of_out)
        shares = op.backward(
            grad,
            _pick(q, self.q_rows),
            _pick(k, self.k_rows),
            _pick(v, self.k_rows),
            out=out,
            lse=lse,
            **self.arguments,
            scale=scores.scale,
            softcap=scores.softcap,
        )
        all_rows = self.q_rows, self.k_rows, self.k_rows
        for total, share, rows in zip(into, shares, all_rows, strict=True):
            if rows is None:
                total.add_(share)
            else:
                total.index_add_(0, rows, share.to(total.dtype))


def make_calls(
    blocks: Blocks, masking: Masking, *, num_q: int, num_k: int, device: torch.device
) -> tuple[Call, ...]:
    """Return the calls that show the queries of all documents their keys.

    num_q, num_k: rows of the tensors that queries and keys are taken from, which lie on `device`.
    """
    groups: dict[tuple[Form, int], list[tuple[range, range]]] = {}
    for queries, keys in blocks:
        for mine in queries:
            seen: Counter[Form] = Counter()
            for theirs in keys:
                for form, q, k in pieces(mine.positions, theirs.positions, masking):
                    # The second piece of a form may have the same queries: another call.
                    group = groups.setdefault((form, seen[form]), [])
                    group.append((mine.rows(q), theirs.rows(k)))
                    seen[form] += 1
    return tuple(
        _call(form, segments, masking, num_q=num_q, num_k=num_k, device=device)
        for (form, _), segments in groups.items()
    )


def _call(
    form: Form,
    segments: list[tuple[range, range]],
    masking: Masking,
    *,
    num_q: int,
    num_k: int,
    device: torch.device,
) -> Call:
    if form == "earlier":
        segments = [(q[::-1], k[::-1]) for q, k in segments]
    lengths = [(len(q), len(k)) for q, k in segments]
    alike = set(lengths) == {(len(segments[0][0]),) * 2}
    native = form == "native"
    return Call(
        q_rows=_index((q for q, _ in segments), num_q, device),
        k_rows=_index((k for _, k in segments), num_k, device),
        arguments={
            "cu_seqlens_q": _bounds((q for q, _ in lengths), device),
            "cu_seqlens_k": _bounds((k for _, k in lengths), device),
            "max_seqlen_q": max(q for q, _ in lengths),
            "max_seqlen_k": max(k for _, k in lengths),
            "uniform": (len(segments), lengths[0][0]) if alike else None,
            "causal": masking.causal if native else form != "full",
            "window": masking.window if native else None,
        },
    )


class Merge:
    """Outputs over several blocks of keys, joined by their log-sum-exp, in at least float32.

    out [t, Q, Dv] and lse [t, Q]; a query that has seen nothing yet has 0 and -inf.
    """

    def __init__(self, q: Tensor, v: Tensor) -> None:
        dtype = accumulation_dtype(q.dtype)
        self.out = q.new_zeros(*q.shape[:2], v.shape[2], dtype=dtype)
        self.lse = q.new_full(q.shape[:2], -torch.inf, dtype=dtype)

    def add(self, rows: Tensor | None, out: Tensor, lse: Tensor) -> None:
        """Join in what `rows` (None: all) of the queries got from another block."""
        before, lse_before = _pick(self.out, rows), _pick(self.lse, rows)
        lse = lse.to(self.lse.dtype)
        total = torch.logaddexp(lse_before, lse)
        base = total.masked_fill(total == -torch.inf, 0.0)  # -inf - -inf is NaN
        joined = before * (lse_before - base).exp().unsqueeze(-1)
        joined += out.to(joined.dtype) * (lse - base).exp().unsqueeze(-1)
        if rows is None:
            self.out, self.lse = joined, total
        else:
            self.out.index_copy_(0, rows, joined)
            self.lse.index_copy_(0, rows, total)


def _pick(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _index(ranges: Iterable[range], num_rows: int, device: torch.device) -> Tensor | None:
    index = torch.cat([torch.arange(r.start, r.stop, r.step) for r in ranges])
    if index.numel() == num_rows and bool((index == torch.arange(num_rows)).all()):
        return None
    return index.to(device)


def _bounds(lengths: Iterable[int], device: torch.device) -> Tensor:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return bounds.to(torch.int32).to(device)
