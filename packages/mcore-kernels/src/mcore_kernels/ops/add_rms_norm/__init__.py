"""Residual sum and RMS norm: `mcore_kernels.protocols.AddRmsNormOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.add_rms_norm.eager import add_rms_norm as eager
from mcore_kernels.ops.add_rms_norm.reference import add_rms_norm as reference
from mcore_kernels.ops.norm_limits import add_rms_norm as limits
from mcore_kernels.requirements import TRITON, needs_device

OPERATOR = Operator(
    "add_rms_norm",
    (
        Implementation(
            op="add_rms_norm",
            name="reference",
            fn=reference,
            summary="a sum, and torch.nn.functional.rms_norm",
        ),
        Implementation(
            op="add_rms_norm",
            name="eager",
            fn=eager,
            requires=(needs_device("cpu"),),
            priority=10,
            summary="a sum, and plain torch with a backward of few passes",
        ),
        Implementation(
            op="add_rms_norm",
            name="triton",
            fn="mcore_kernels.ops.norm_triton:add_rms_norm",
            requires=TRITON,
            limits=limits,
            second="reference",
            priority=20,
            summary="one pass over the rows each way, sum included",
        ),
        Implementation(
            op="add_rms_norm",
            name="invariant",
            fn="mcore_kernels.ops.norm_invariant:add_rms_norm",
            priority=-1,
            summary="by name only: a row does not depend on the batch",
        ),
    ),
)
