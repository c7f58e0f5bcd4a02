"""Short causal convolution of every channel: `mcore_kernels.protocols.CausalConv1dOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.causal_conv1d.reference import causal_conv1d as reference
from mcore_kernels.ops.causal_conv1d.reference import limits
from mcore_kernels.requirements import TRITON

OPERATOR = Operator(
    "causal_conv1d",
    (
        Implementation(
            op="causal_conv1d",
            name="reference",
            fn=reference,
            summary="one shifted product for each tap; documents apart by their own history rows",
        ),
        Implementation(
            op="causal_conv1d",
            name="triton",
            fn="mcore_kernels.ops.causal_conv1d.triton:causal_conv1d",
            requires=TRITON,
            limits=limits,
            second="reference",
            priority=20,
            summary="each number read once, each way; from initial states the reference",
        ),
    ),
)
