"""Tokens to the order of their experts and back: `mcore_kernels.protocols.MoePermuteOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.moe_permute.reference import ReferencePermute
from mcore_kernels.requirements import TRITON

OPERATOR = Operator(
    "moe_permute",
    (
        Implementation(
            op="moe_permute",
            name="reference",
            fn=ReferencePermute(),
            summary="gathers of torch; copies of all rows in float32 to sum them",
        ),
        Implementation(
            op="moe_permute",
            name="triton",
            fn="mcore_kernels.ops.moe_permute.triton:PERMUTE",
            requires=TRITON,
            priority=20,
            summary="one pass each way, weights and sums included",
        ),
    ),
)
