"""Where local tensors lie in named global tensors, and how to get from one such layout to another.

Pure arithmetic except for `transfer`, which moves the elements over a `Group`.
"""

from mcore_parallel.layout.box import Box
from mcore_parallel.layout.fragment import Fragment
from mcore_parallel.layout.layout import LayoutTensor, TensorLayout

__all__ = ["Box", "Fragment", "LayoutTensor", "TensorLayout"]
