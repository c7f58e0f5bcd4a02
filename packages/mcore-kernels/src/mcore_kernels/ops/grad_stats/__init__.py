"""Norm and health of gradients: `mcore_kernels.protocols.GradStatsOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.grad_stats.reference import grad_stats as reference
from mcore_kernels.ops.grad_stats.reference import limits
from mcore_kernels.requirements import TRITON

OPERATOR = Operator(
    "grad_stats",
    (
        Implementation(
            op="grad_stats",
            name="reference",
            fn=reference,
            summary="plain torch, buffer by buffer",
        ),
        Implementation(
            op="grad_stats",
            name="triton",
            fn="mcore_kernels.ops.grad_stats.triton:grad_stats",
            requires=TRITON,
            limits=limits,
            second="reference",
            priority=20,
            summary="one pass for both numbers, in a fixed order of sums",
        ),
    ),
)
