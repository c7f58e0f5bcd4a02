"""The product of numbers of 8 bits: `mcore_kernels.protocols.Fp8MatmulOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.fp8_matmul.reference import fp8_matmul as reference
from mcore_kernels.ops.fp8_matmul.reference import native_limits
from mcore_kernels.requirements import TRITON, needs_arch, needs_device

OPERATOR = Operator(
    "fp8_matmul",
    (
        Implementation(
            op="fp8_matmul",
            name="reference",
            fn=reference,
            summary="the product of what the numbers stand for, in float32; runs anywhere",
        ),
        Implementation(
            op="fp8_matmul",
            name="triton",
            fn="mcore_kernels.ops.fp8_matmul.triton:fp8_matmul",
            requires=(*TRITON, needs_arch((8, 9))),
            priority=10,
            summary="scales of blocks taken in between pieces of the sums",
        ),
        Implementation(
            op="fp8_matmul",
            name="native",
            fn="mcore_kernels.ops.fp8_matmul.native:fp8_matmul",
            requires=(*TRITON, needs_device("cuda"), needs_arch((9, 0))),
            limits=native_limits,
            second="triton",
            priority=20,
            summary="torch's scaled product; of blocks, e4m3 in pieces of 128 with such or tiles",
        ),
    ),
)
