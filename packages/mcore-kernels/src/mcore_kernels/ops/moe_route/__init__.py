"""The router of a mixture of experts: `mcore_kernels.protocols.MoeRouteOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.moe_route.reference import moe_route as reference

OPERATOR = Operator(
    "moe_route",
    (
        Implementation(
            op="moe_route",
            name="reference",
            fn=reference,
            summary="plain torch; a stable sort for ties",
        ),
    ),
)
