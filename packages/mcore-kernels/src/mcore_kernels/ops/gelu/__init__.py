"""Gaussian error linear unit: `mcore_kernels.protocols.GeluOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.activation_limits import limits
from mcore_kernels.ops.gelu.reference import gelu as reference
from mcore_kernels.requirements import TRITON

OPERATOR = Operator(
    "gelu",
    (
        Implementation(
            op="gelu",
            name="reference",
            fn=reference,
            summary="torch.nn.functional.gelu",
        ),
        Implementation(
            op="gelu",
            name="triton",
            fn="mcore_kernels.ops.activation_triton:gelu",
            requires=TRITON,
            limits=limits,
            second="reference",
            priority=20,
            summary="one pass each way; keeps only its input",
        ),
    ),
)
