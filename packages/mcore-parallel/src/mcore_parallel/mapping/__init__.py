"""Between another format's named tensors and ours: two-way operators, answered region by region.

    mapping = TensorMapping([
        Rename("model.layers.{layer}.mlp.{part:gate|up|down}_proj.weight",
               "layers.{layer}.mlp.{part}.weight"),
        Split("model.layers.{layer}.qkv.weight",
              tuple(f"layers.{{layer}}.attention.{part}.weight" for part in "qkv"),
              sizes=(4096, 1024, 1024)),
    ])

A mapping is a value. `mapping.forward(metas)` tells how each of our tensors, and each region of it,
is made of theirs; `mapping.inverse(metas)` the reverse. `Resolved.translate` rewrites the layout of
a local tensor so that it names their tensors, and `MappedReader` fills it by reading just these
regions.
"""

from mcore_parallel.mapping.mapping import Resolved, TensorMapping
from mcore_parallel.mapping.operators import (
    Concat,
    Drop,
    Exact,
    Inward,
    Operator,
    Rename,
    Reshape,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from mcore_parallel.mapping.reading import MappedReader, evaluate
from mcore_parallel.mapping.tensors import Mapped, Step, TensorMeta, Tensors

__all__ = [
    "Concat",
    "Drop",
    "Exact",
    "Inward",
    "Mapped",
    "MappedReader",
    "Operator",
    "Rename",
    "Reshape",
    "Resolved",
    "Split",
    "Stack",
    "Step",
    "TensorMapping",
    "TensorMeta",
    "Tensors",
    "Transpose",
    "Unstack",
    "evaluate",
]
