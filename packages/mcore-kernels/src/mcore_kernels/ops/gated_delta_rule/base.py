"""What the implementations of the gated delta rule share: checks of what they are given."""

from __future__ import annotations

from torch import Tensor


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor,
    uniform: tuple[int, int] | None,
    initial_states: Tensor | None,
    chunk_size: int,
) -> None:
    """ValueError for arguments that do not fit together."""
    rows, heads, size = v.shape
    count = cu_seqlens.shape[0] - 1
    if chunk_size < 1:
        raise ValueError(f"gated_delta_rule: chunk_size must be at least 1, got {chunk_size}")
    if q.dim() != 3 or q.shape != k.shape:
        raise ValueError(
            f"gated_delta_rule: q and k are both [rows, key heads, size], got {list(q.shape)} and "
            f"{list(k.shape)}"
        )
    if heads % q.shape[1]:
        raise ValueError(
            f"gated_delta_rule: the number of key heads must divide that of value heads, got "
            f"{q.shape[1]} and {heads}"
        )
    if q.shape[0] != rows:
        raise ValueError(f"gated_delta_rule: v has {rows} rows, q and k have {q.shape[0]}")
    for name, value in (("g", g), ("beta", beta)):
        if value.shape != (rows, heads):
            raise ValueError(
                f"gated_delta_rule: v has {rows} rows of {heads} heads, {name} is "
                f"{list(value.shape)}"
            )
    states = (count, heads, q.shape[2], size)
    if initial_states is not None and initial_states.shape != states:
        raise ValueError(
            f"gated_delta_rule: {count} documents have initial states {list(states)}, got "
            f"{list(initial_states.shape)}"
        )
    if uniform is not None and (uniform[0] != count or uniform[0] * uniform[1] != rows):
        raise ValueError(
            f"gated_delta_rule: uniform={uniform} means {uniform[0] * uniform[1]} rows of "
            f"{uniform[0]} documents, got {rows} rows of {count}"
        )
