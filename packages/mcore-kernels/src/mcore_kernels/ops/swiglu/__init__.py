"""Gated activation of feed-forward layers: `mcore_kernels.protocols.SwigluOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.swiglu.reference import swiglu as reference

OPERATOR = Operator(
    "swiglu",
    (
        Implementation(
            op="swiglu",
            name="reference",
            fn=reference,
            summary="torch.nn.functional.silu, and a product",
        ),
    ),
)
