"""The router of a mixture of experts: `mcore_kernels.protocols.MoeRouteOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.moe_route.limits import limits
from mcore_kernels.ops.moe_route.reference import moe_route as reference
from mcore_kernels.requirements import TRITON

OPERATOR = Operator(
    "moe_route",
    (
        Implementation(
            op="moe_route",
            name="reference",
            fn=reference,
            summary="plain torch; a stable sort for ties",
        ),
        Implementation(
            op="moe_route",
            name="triton",
            fn="mcore_kernels.ops.moe_route.triton:moe_route",
            requires=TRITON,
            limits=limits,
            second="reference",
            priority=20,
            summary="one launch each way",
        ),
    ),
)
