"""Linear attention by the gated delta rule: `mcore_kernels.protocols.GatedDeltaRuleOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.gated_delta_rule.chunked import gated_delta_rule as chunked
from mcore_kernels.ops.gated_delta_rule.limits import limits
from mcore_kernels.ops.gated_delta_rule.reference import gated_delta_rule as reference
from mcore_kernels.requirements import TRITON

OPERATOR = Operator(
    "gated_delta_rule",
    (
        Implementation(
            op="gated_delta_rule",
            name="reference",
            fn=reference,
            summary="the recurrence, token after token",
        ),
        Implementation(
            op="gated_delta_rule",
            name="chunked",
            fn=chunked,
            priority=10,
            summary="matrix products within chunks, the recurrence from chunk to chunk",
        ),
        Implementation(
            op="gated_delta_rule",
            name="triton",
            fn="mcore_kernels.ops.gated_delta_rule.triton:gated_delta_rule",
            requires=TRITON,
            limits=limits,
            second="chunked",
            priority=20,
            summary="chunks side by side, states carried between them; keeps only arguments",
        ),
    ),
)
