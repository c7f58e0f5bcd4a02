"""Products per expert in numbers of 8 bits: `mcore_kernels.protocols.Fp8GroupedOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.fp8_grouped.reference import GROUPED
from mcore_kernels.requirements import TRITON, needs_arch

OPERATOR = Operator(
    "fp8_grouped",
    (
        Implementation(
            op="fp8_grouped",
            name="reference",
            fn=GROUPED,
            summary="one expert after another, products by way of float32; runs anywhere",
        ),
        Implementation(
            op="fp8_grouped",
            name="triton",
            fn="mcore_kernels.ops.fp8_grouped.triton:GROUPED",
            requires=(*TRITON, needs_arch((8, 9))),
            priority=20,
            summary="all experts in one launch, counts left on the device",
        ),
    ),
)
