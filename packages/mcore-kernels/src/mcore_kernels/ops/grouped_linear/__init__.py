"""A linear operator per expert: `mcore_kernels.protocols.GroupedLinearOp`."""

import torch

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.grouped_linear.reference import ReferenceGroupedLinear
from mcore_kernels.requirements import TRITON, needs_arch, needs_device, needs_dtype

OPERATOR = Operator(
    "grouped_linear",
    (
        Implementation(
            op="grouped_linear",
            name="reference",
            fn=ReferenceGroupedLinear(),
            summary="torch's matrix products, one expert after another",
        ),
        Implementation(
            op="grouped_linear",
            name="triton",
            fn="mcore_kernels.ops.grouped_linear.triton:GROUPED",
            requires=TRITON,
            priority=20,
            summary="all experts in one launch each way, weight gradients into float32 buffers",
        ),
        Implementation(
            op="grouped_linear",
            name="native",
            fn="mcore_kernels.ops.grouped_linear.native:GROUPED",
            requires=(
                *TRITON,
                needs_device("cuda"),
                needs_arch((9, 0)),
                needs_dtype(torch.bfloat16),
            ),
            priority=30,
            summary="torch's grouped product; weight gradients in Triton or expert by expert",
        ),
        Implementation(
            op="grouped_linear",
            name="hopper",
            fn="mcore_kernels.ops.grouped_linear.hopper:GROUPED",
            requires=(
                *TRITON,
                needs_device("cuda"),
                needs_arch((9, 0), below=(10, 0)),
                needs_dtype(torch.bfloat16),
            ),
            priority=40,
            summary="own kernels fed by the memory unit, for all products; counts stay on the GPU",
        ),
    ),
)
