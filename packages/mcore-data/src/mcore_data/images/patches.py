"""Images as rows of patches, and back.

C channels, H height, W width, P side of a patch, N = (H / P) * (W / P) patches.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def patchify(image: NDArray[Any], patch: int) -> NDArray[Any]:
    """Return the patches [N, C * P * P] of an image [C, H, W], row by row.

    Within a patch channels come first, then rows: a matrix product with the weight of a convolution
    of side and stride P, flattened, is that convolution. ValueError when P does not divide H and W.
    """
    channels, height, width = image.shape
    check_patch((height, width), patch)
    parts = image.reshape(channels, height // patch, patch, width // patch, patch)
    return np.ascontiguousarray(parts.transpose(1, 3, 0, 2, 4)).reshape(
        -1, channels * patch * patch
    )


def unpatchify(patches: NDArray[Any], size: tuple[int, int], patch: int) -> NDArray[Any]:
    """Return the image [C, H, W] that `patchify` made into `patches`; `size` is (H, W)."""
    check_patch(size, patch)
    rows, columns = size[0] // patch, size[1] // patch
    if len(patches) != rows * columns:
        raise ValueError(f"{len(patches)} patches, an image of {size} has {rows * columns}")
    parts = patches.reshape(rows, columns, -1, patch, patch).transpose(2, 0, 3, 1, 4)
    return np.ascontiguousarray(parts).reshape(-1, *size)


def check_patch(size: tuple[int, int], patch: int) -> None:
    """Raise ValueError when images of (H, W) are no whole number of patches."""
    if patch < 1 or any(n % patch for n in size):
        nearest = " x ".join(str(max(1, round(n / max(patch, 1))) * max(patch, 1)) for n in size)
        raise ValueError(
            f"an image of {size[0]} x {size[1]} has no whole number of patches of side {patch}; "
            f"nearest: {nearest}"
        )
