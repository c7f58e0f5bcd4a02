"""The choice of the next token: `mcore_kernels.protocols.SampleOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.sample.limits import limits
from mcore_kernels.ops.sample.reference import sample as reference
from mcore_kernels.requirements import TRITON

OPERATOR = Operator(
    "sample",
    (
        Implementation(
            op="sample",
            name="reference",
            fn=reference,
            summary="plain torch in float64; nothing is read back from the device",
        ),
        Implementation(
            op="sample",
            name="triton",
            fn="mcore_kernels.ops.sample.triton:sample",
            requires=TRITON,
            limits=limits,
            second="reference",
            priority=20,
            summary="float64 without a sort: the tokens of reference in four launches",
        ),
    ),
)
