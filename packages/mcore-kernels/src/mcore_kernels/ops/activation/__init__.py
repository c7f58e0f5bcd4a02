"""Activations without a gate: `mcore_kernels.protocols.ActivationOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.activation.reference import activation as reference
from mcore_kernels.ops.activation_limits import limits
from mcore_kernels.requirements import TRITON

OPERATOR = Operator(
    "activation",
    (
        Implementation(
            op="activation",
            name="reference",
            fn=reference,
            summary="plain torch; keeps only its arguments",
        ),
        Implementation(
            op="activation",
            name="triton",
            fn="mcore_kernels.ops.activation_triton:activation",
            requires=TRITON,
            limits=limits,
            second="reference",
            priority=20,
            summary="one pass each way; keeps only its arguments",
        ),
    ),
)
