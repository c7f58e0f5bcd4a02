"""Which decoder layers each pipeline stage holds."""

from __future__ import annotations

from collections.abc import Sequence


def stage_layers(num_layers: int, pp: int, counts: Sequence[int] | None = None) -> list[range]:
    """Return the global layer ids of each of `pp` stages, in execution order 0 … num_layers-1.

    Without `counts` the stages are as even as possible, the first ones larger. `counts` gives every
    stage's number of layers (an uneven first or last stage included; 0 for a stage that holds only
    the embedding or the head). Where every stage holds several chunks (interleaving), pass
    pp · chunks as `pp`: entry c · pp + s then is chunk c of stage s. ValueError when the counts do
    not cover the layers exactly, or when there are fewer layers than stages and no counts say which
    stages are empty.
    """
    if pp < 1 or num_layers < 0:
        raise ValueError(
            f"{num_layers} layers over {pp} pipeline stages: need 0 or more over 1 or more"
        )
    if counts is None:
        if num_layers < pp:
            raise ValueError(
                f"{num_layers} layers are fewer than pp = {pp} pipeline stages; use pp ≤ "
                f"{max(num_layers, 1)} or give stage_layers with zeros for stages without layers"
            )
        counts = _even(num_layers, pp)
    counts = list(counts)
    if len(counts) != pp:
        raise ValueError(
            f"stage_layers {counts} has {len(counts)} counts for pp = {pp} pipeline stages"
        )
    if min(counts) < 0:
        raise ValueError(f"stage_layers {counts}: a stage cannot hold {min(counts)} layers")
    if sum(counts) != num_layers:
        raise ValueError(
            f"stage_layers {counts} sum to {sum(counts)}, not to {num_layers} layers; "
            f"an even split is {_even(num_layers, pp)}"
        )
    starts = [sum(counts[:stage]) for stage in range(pp)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def _even(num_layers: int, pp: int) -> list[int]:
    even, larger = divmod(num_layers, pp)
    return [even + 1] * larger + [even] * (pp - larger)
