"""CRC-32 of chunks, as in gzip. The one module that imports zlib-ng, where that is installed.

The values are zlib's; zlib-ng uses the carry-less multiplication of newer processors, and is
several times as fast as reading from memory.
"""

from __future__ import annotations

import numpy as np

from mcore_ckpt.dtypes import Array

try:
    from zlib_ng.zlib_ng import crc32

    LIBRARY = "zlib-ng"
except ImportError:
    from zlib import crc32

    LIBRARY = "zlib"

__all__ = ["LIBRARY", "checksum", "crc32"]


def checksum(array: Array) -> int:
    """Return the CRC-32 of an array's bytes in row-major order."""
    return crc32(np.asarray(array, order="C").data)
