"""Matrix product with a weight: `mcore_kernels.protocols.LinearOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.linear.reference import ReferenceLinear

OPERATOR = Operator(
    "linear",
    (
        Implementation(
            op="linear",
            name="reference",
            fn=ReferenceLinear(),
            summary="torch's own matrix products",
        ),
    ),
)
