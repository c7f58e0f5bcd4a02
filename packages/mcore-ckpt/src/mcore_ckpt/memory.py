"""Memory for what a file claims to hold: a damaged or a foreign one may claim any size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from mcore_ckpt.errors import CheckpointError

_LARGE = 256 << 20  # bytes: what is smaller is not asked for beforehand


def new_tensor(shape: Sequence[int], dtype: torch.dtype, what: str) -> torch.Tensor:
    """Return a new CPU tensor, its elements not set.

    Raises:
        CheckpointError: there is no room for it; begins with `what`.
    """
    check_room(math.prod(shape) * dtype.itemsize, what)
    return torch.empty(tuple(shape), dtype=dtype)


def check_room(num_bytes: int, what: str) -> None:
    """Raise CheckpointError, which begins with `what`, when so much memory cannot be had.

    Libraries that decode end the process when they run out of it. Nothing is touched here, so
    where the system promises more than it has, this lets it.
    """
    if num_bytes <= _LARGE:
        return
    try:
        np.empty(num_bytes, dtype=np.uint8)
    except (MemoryError, ValueError):  # ValueError: no array can be that large
        raise CheckpointError(
            f"{what} takes {num_bytes} bytes of memory, more than can be had here"
        ) from None
