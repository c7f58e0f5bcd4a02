"""The choice of the next token: `mcore_kernels.protocols.SampleOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.sample.reference import sample as reference

OPERATOR = Operator(
    "sample",
    (
        Implementation(
            op="sample",
            name="reference",
            fn=reference,
            summary="plain torch in float64; nothing is read back from the device",
        ),
    ),
)
