"""Adam on flat buffers: `mcore_kernels.protocols.AdamOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.adam.limits import limits
from mcore_kernels.ops.adam.reference import adam as reference
from mcore_kernels.requirements import TRITON

OPERATOR = Operator(
    "adam",
    (
        Implementation(
            op="adam",
            name="reference",
            fn=reference,
            summary="plain torch, operation by operation",
        ),
        Implementation(
            op="adam",
            name="triton",
            fn="mcore_kernels.ops.adam.triton:adam",
            requires=TRITON,
            limits=limits,
            second="reference",
            priority=20,
            summary="one pass: unscaling, moments, value and its rounded copy",
        ),
    ),
)
