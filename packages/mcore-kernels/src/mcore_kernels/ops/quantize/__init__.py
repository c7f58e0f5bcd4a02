"""Numbers of 8 bits with scales: `mcore_kernels.protocols.QuantizeOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.quantize.reference import QUANTIZE
from mcore_kernels.requirements import TRITON

OPERATOR = Operator(
    "quantize",
    (
        Implementation(
            op="quantize",
            name="reference",
            fn=QUANTIZE,
            summary="plain torch",
        ),
        Implementation(
            op="quantize",
            name="triton",
            fn="mcore_kernels.ops.quantize.triton:QUANTIZE",
            requires=TRITON,
            priority=20,
            summary="numbers, their transposes and scales of blocks in one pass",
        ),
    ),
)
