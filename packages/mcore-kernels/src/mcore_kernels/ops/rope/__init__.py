"""Rotary position embedding: `mcore_kernels.protocols.RopeOp`, and its angles."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.rope.reference import rope as reference

OPERATOR = Operator(
    "rope",
    (
        Implementation(
            op="rope",
            name="reference",
            fn=reference,
            summary="products and sums of rolled halves",
        ),
    ),
)
