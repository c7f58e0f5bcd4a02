"""Layer normalisation: `mcore_kernels.protocols.LayerNormOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.layer_norm.reference import layer_norm as reference
from mcore_kernels.ops.norm_limits import layer_norm as limits
from mcore_kernels.requirements import TRITON

OPERATOR = Operator(
    "layer_norm",
    (
        Implementation(
            op="layer_norm",
            name="reference",
            fn=reference,
            summary="torch.nn.functional.layer_norm",
        ),
        Implementation(
            op="layer_norm",
            name="triton",
            fn="mcore_kernels.ops.norm_triton:layer_norm",
            requires=TRITON,
            limits=limits,
            second="reference",
            priority=20,
            summary="one pass over the rows each way",
        ),
        Implementation(
            op="layer_norm",
            name="invariant",
            fn="mcore_kernels.ops.norm_invariant:layer_norm",
            priority=-1,
            summary="by name only: a row does not depend on the batch",
        ),
    ),
)
