"""Where parameters lie in the flat buffers of Megatron-LM's distributed optimizer.

Its `dp_reshardable` state, and `distrib_optim.pt` of its older files, hold each moment as flat
buffers for each model-parallel rank, cut into buckets. Parameters follow each other in the reverse
order of the modules. Each begins at a multiple of 64 elements; a bucket ends after one of them.
Which ones a bucket has follows from its length, which is that without the padding at its end. Where
buckets are joined, without that padding, their lengths follow from the stored arguments.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mcore_parallel.layout import TensorLayout

ALIGNMENT = 64
"""Elements: each parameter begins at a multiple of these within its bucket."""
_LEAST, _PER_REPLICA = 40_000_000, 1_000_000
"""Elements of a bucket where no number was given: at least, and for each data-parallel rank."""


def place_parameters(
    shapes: Mapping[str, tuple[int, ...]], lengths: Sequence[int], where: str
) -> dict[str, tuple[int, int]]:
    """Return bucket and first element of each parameter.

    shapes: of the parameters that a rank holds, in the order of its modules. lengths: elements of
    each bucket, without the padding at its end. where: for messages.

    Raises:
        ValueError: parameters of these shapes do not fill buckets of these lengths.
    """
    places: dict[str, tuple[int, int]] = {}
    bucket, end = 0, 0
    for name, shape in reversed(list(shapes.items())):
        if bucket < len(lengths) and end == lengths[bucket]:
            bucket, end = bucket + 1, 0
        start = _aligned(end)
        end = start + math.prod(shape)
        if bucket == len(lengths) or end > lengths[bucket]:
            room = lengths[bucket] if bucket < len(lengths) else 0
            raise ValueError(
                f"{where}: {name} of shape {list(shape)} would end at element {end} of bucket "
                f"{bucket}, which has {room}: the buckets are not those of the stored arguments"
            )
        places[name] = bucket, start
    if bucket + 1 < len(lengths) or (lengths and end != lengths[-1]):
        raise ValueError(
            f"{where}: the parameters end at element {end} of bucket {bucket}, and there are "
            f"buckets of {list(lengths)}: they are not those of the stored arguments"
        )
    return places


def bucket_lengths(
    shapes: Mapping[str, tuple[int, ...]], length: int, args: Mapping[str, Any], where: str
) -> list[int]:
    """Return the lengths of the buckets that a buffer of `length` elements is joined from.

    A bucket is closed by the parameter that makes it as large as the arguments say; without
    overlap of communication there is one. shapes: as for `place_parameters`.

    Raises:
        ValueError: neither gives that length.
    """
    ranks = int(args.get("world_size") or 1)
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        ranks //= int(args.get(name) or 1)
    size = args.get("ddp_bucket_size") or max(_LEAST, _PER_REPLICA * ranks)
    for limit in (math.inf, size):
        lengths = [0]
        for shape in reversed(list(shapes.values())):
            if lengths[-1] >= limit:
                lengths.append(0)
            lengths[-1] = _aligned(lengths[-1]) + math.prod(shape)
        if sum(lengths) == length:
            return lengths
    raise ValueError(
        f"{where}: {length} elements, and the parameters of the stored arguments take "
        f"{sum(lengths)}"
    )


def parts_of(
    shapes: Mapping[str, tuple[int, ...]], stored: str, lengths: Sequence[int], where: str
) -> Iterator[tuple[str, TensorLayout]]:
    """Yield each parameter with its layout over a flat tensor that the buckets are joined in.

    stored: its name. Otherwise as `place_parameters`.
    """
    begins = [0, *itertools.accumulate(lengths)]
    flat = TensorLayout.whole(stored, (begins[-1],))
    for name, (bucket, start) in place_parameters(shapes, lengths, where).items():
        first = begins[bucket] + start
        part = flat.slice(0, first, first + math.prod(shapes[name]))
        yield name, part.reshaped(shapes[name])


def parts_in(
    shapes: Mapping[str, tuple[int, ...]], buckets: Sequence[tuple[str, int]], where: str
) -> Iterator[tuple[str, TensorLayout]]:
    """Yield each parameter with its layout over the flat tensors that the buckets are stored in.

    buckets: name and length of each. Otherwise as `place_parameters`.
    """
    lengths = [length for _, length in buckets]
    for name, (bucket, start) in place_parameters(shapes, lengths, where).items():
        stored, length = buckets[bucket]
        part = TensorLayout.whole(stored, (length,)).slice(
            0, start, start + math.prod(shapes[name])
        )
        yield name, part.reshaped(shapes[name])


def _aligned(element: int) -> int:
    return -(-element // ALIGNMENT) * ALIGNMENT
