"""Gated activations in all variants: `mcore_kernels.protocols.GluOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.activation_limits import limits
from mcore_kernels.ops.glu.reference import glu as reference
from mcore_kernels.requirements import TRITON

OPERATOR = Operator(
    "glu",
    (
        Implementation(
            op="glu",
            name="reference",
            fn=reference,
            summary="plain torch; keeps only its arguments",
        ),
        Implementation(
            op="glu",
            name="triton",
            fn="mcore_kernels.ops.activation_triton:glu",
            requires=TRITON,
            limits=limits,
            second="reference",
            priority=20,
            summary="one pass each way; keeps only its arguments",
        ),
    ),
)
