"""Vectors of length one, such as queries and keys: `mcore_kernels.protocols.L2NormOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.l2_norm.reference import l2_norm as reference
from mcore_kernels.ops.norm_limits import l2_norm as limits
from mcore_kernels.requirements import TRITON

OPERATOR = Operator(
    "l2_norm",
    (
        Implementation(
            op="l2_norm",
            name="reference",
            fn=reference,
            summary="plain torch",
        ),
        Implementation(
            op="l2_norm",
            name="triton",
            fn="mcore_kernels.ops.norm_triton:l2_norm",
            requires=TRITON,
            limits=limits,
            second="reference",
            priority=20,
            summary="one pass over the rows each way",
        ),
    ),
)
