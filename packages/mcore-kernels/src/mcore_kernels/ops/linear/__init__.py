"""Matrix product with a weight: `mcore_kernels.protocols.LinearOp`."""

import torch

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.linear.reference import ReferenceLinear
from mcore_kernels.requirements import needs_arch, needs_device, needs_dtype

OPERATOR = Operator(
    "linear",
    (
        Implementation(
            op="linear",
            name="reference",
            fn=ReferenceLinear(),
            summary="torch's own matrix products",
        ),
        Implementation(
            op="linear",
            name="mixed",
            fn="mcore_kernels.ops.linear.mixed:LINEAR",
            requires=(
                needs_device("cuda"),
                needs_arch((8, 0)),
                needs_dtype(torch.bfloat16, torch.float16),
            ),
            priority=20,
            summary="16-bit weight gradients added to float32 buffers within the product",
        ),
        Implementation(
            op="linear",
            name="invariant",
            fn="mcore_kernels.ops.linear.invariant:LINEAR",
            priority=-1,
            summary="by name only: a row does not depend on the batch",
        ),
    ),
)
