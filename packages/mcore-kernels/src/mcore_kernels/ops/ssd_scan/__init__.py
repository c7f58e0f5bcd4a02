"""The state space of Mamba-2 over packed documents: `mcore_kernels.protocols.SsdScanOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.ssd_scan.chunked import ssd_scan as chunked
from mcore_kernels.ops.ssd_scan.limits import limits
from mcore_kernels.ops.ssd_scan.reference import ssd_scan as reference
from mcore_kernels.requirements import TRITON

OPERATOR = Operator(
    "ssd_scan",
    (
        Implementation(
            op="ssd_scan",
            name="reference",
            fn=reference,
            summary="the recurrence, token after token",
        ),
        Implementation(
            op="ssd_scan",
            name="chunked",
            fn=chunked,
            priority=10,
            summary="matrix products within chunks, the recurrence from chunk to chunk",
        ),
        Implementation(
            op="ssd_scan",
            name="triton",
            fn="mcore_kernels.ops.ssd_scan.triton:ssd_scan",
            requires=TRITON,
            limits=limits,
            second="chunked",
            priority=20,
            summary="chunks side by side, states carried between them; keeps only its arguments",
        ),
    ),
)
