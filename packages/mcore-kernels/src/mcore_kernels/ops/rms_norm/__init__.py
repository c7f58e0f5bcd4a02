"""Root-mean-square normalisation: `mcore_kernels.protocols.RmsNormOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.norm_limits import rms_norm as limits
from mcore_kernels.ops.rms_norm.eager import rms_norm as eager
from mcore_kernels.ops.rms_norm.reference import rms_norm as reference
from mcore_kernels.requirements import TRITON, needs_device

OPERATOR = Operator(
    "rms_norm",
    (
        Implementation(
            op="rms_norm",
            name="reference",
            fn=reference,
            summary="torch.nn.functional.rms_norm",
        ),
        Implementation(
            op="rms_norm",
            name="eager",
            fn=eager,
            requires=(needs_device("cpu"),),
            priority=10,
            summary="plain torch with a backward of few passes",
        ),
        Implementation(
            op="rms_norm",
            name="triton",
            fn="mcore_kernels.ops.norm_triton:rms_norm",
            requires=TRITON,
            limits=limits,
            second="reference",
            priority=20,
            summary="one pass over the rows each way",
        ),
        Implementation(
            op="rms_norm",
            name="invariant",
            fn="mcore_kernels.ops.norm_invariant:rms_norm",
            priority=-1,
            summary="by name only: a row does not depend on the batch",
        ),
    ),
)
