"""Layer normalisation: `mcore_kernels.protocols.LayerNormOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.layer_norm.reference import layer_norm as reference

OPERATOR = Operator(
    "layer_norm",
    (
        Implementation(
            op="layer_norm",
            name="reference",
            fn=reference,
            summary="torch.nn.functional.layer_norm",
        ),
    ),
)
