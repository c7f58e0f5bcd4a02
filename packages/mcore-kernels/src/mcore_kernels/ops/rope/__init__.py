"""Rotary position embedding: `mcore_kernels.protocols.RopeOp`, and its angles."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.rope.limits import limits
from mcore_kernels.ops.rope.reference import ReferenceRope
from mcore_kernels.requirements import TRITON

OPERATOR = Operator(
    "rope",
    (
        Implementation(
            op="rope",
            name="reference",
            fn=ReferenceRope(),
            summary="products and sums of rolled halves",
        ),
        Implementation(
            op="rope",
            name="triton",
            fn="mcore_kernels.ops.rope.triton:ROPE",
            requires=TRITON,
            limits=limits,
            second="reference",
            priority=20,
            summary="one launch for q and k each way; keeps only the angles",
        ),
    ),
)
