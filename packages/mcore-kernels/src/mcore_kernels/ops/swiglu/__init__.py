"""Gated activation of feed-forward layers: `mcore_kernels.protocols.SwigluOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.activation_limits import limits
from mcore_kernels.ops.swiglu.reference import swiglu as reference
from mcore_kernels.requirements import TRITON

OPERATOR = Operator(
    "swiglu",
    (
        Implementation(
            op="swiglu",
            name="reference",
            fn=reference,
            summary="torch.nn.functional.silu, and a product",
        ),
        Implementation(
            op="swiglu",
            name="triton",
            fn="mcore_kernels.ops.activation_triton:swiglu",
            requires=TRITON,
            limits=limits,
            second="reference",
            priority=20,
            summary="one pass each way; keeps only its input",
        ),
    ),
)
