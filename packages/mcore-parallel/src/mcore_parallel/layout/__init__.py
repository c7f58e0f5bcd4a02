"""Where local tensors lie in named global tensors, and how to get from one such layout to another.

Pure arithmetic except for `transfer` and what is built on it, which move elements over a `Group`.
"""

from mcore_parallel.layout.box import Box, row_major_strides
from mcore_parallel.layout.fragment import Fragment
from mcore_parallel.layout.layout import LayoutTensor, TensorLayout
from mcore_parallel.layout.plan import Copy, Place, RankLayouts, plan
from mcore_parallel.layout.tiling import check_tiling
from mcore_parallel.layout.transfer import (
    gather_all,
    gather_global,
    gather_layouts,
    reshard,
    transfer,
)

__all__ = [
    "Box",
    "Copy",
    "Fragment",
    "LayoutTensor",
    "Place",
    "RankLayouts",
    "TensorLayout",
    "check_tiling",
    "gather_all",
    "gather_global",
    "gather_layouts",
    "plan",
    "reshard",
    "row_major_strides",
    "transfer",
]
