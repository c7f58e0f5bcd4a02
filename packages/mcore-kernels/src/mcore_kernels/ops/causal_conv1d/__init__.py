"""Short causal convolution of every channel: `mcore_kernels.protocols.CausalConv1dOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.causal_conv1d.reference import causal_conv1d as reference

OPERATOR = Operator(
    "causal_conv1d",
    (
        Implementation(
            op="causal_conv1d",
            name="reference",
            fn=reference,
            summary="one shifted product for each tap; documents apart by their own history rows",
        ),
    ),
)
