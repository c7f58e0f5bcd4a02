"""Gaussian error linear unit: `mcore_kernels.protocols.GeluOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.gelu.reference import gelu as reference

OPERATOR = Operator(
    "gelu",
    (
        Implementation(
            op="gelu",
            name="reference",
            fn=reference,
            summary="torch.nn.functional.gelu",
        ),
    ),
)
