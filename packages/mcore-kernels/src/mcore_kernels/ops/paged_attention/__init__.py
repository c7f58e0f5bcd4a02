"""Attention over pages of keys and values: `mcore_kernels.protocols.PagedAttentionOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.paged_attention.limits import MAX_HEAD_DIM, limits
from mcore_kernels.ops.paged_attention.reference import paged_attention as reference
from mcore_kernels.requirements import TRITON, needs_head_dim

OPERATOR = Operator(
    "paged_attention",
    (
        Implementation(
            op="paged_attention",
            name="reference",
            fn=reference,
            summary="pages put together, then matrix products",
        ),
        Implementation(
            op="paged_attention",
            name="triton",
            fn="mcore_kernels.ops.paged_attention.triton:paged_attention",
            requires=(*TRITON, needs_head_dim(maximum=MAX_HEAD_DIM)),
            limits=limits,
            second="reference",
            priority=20,
            summary="pages read where they lie; decoding and prompt chunks in one launch",
        ),
    ),
)
