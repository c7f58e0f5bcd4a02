"""What each operator owes its callers, whichever implementation stands behind it.

Shapes: T tokens, H hidden, F feed-forward, I/O input and output features, N segments, Q query
heads, K kv heads, D head size of queries and keys, Dv of values, R rotary size, V columns of a
vocabulary shard; E experts, k chosen for a token; C channels, W taps of a convolution, h heads of
size P with a state of size S, G groups of heads. "…" is any leading shape. Every size but H, D, R,
W, E, k, G and h may be 0.

Dtypes: the accumulation dtype is float32, or float64 when the input is float64. Operators
compute in it and round once, at the end, to the dtype of their first argument.
"""

from mcore_kernels.protocols.attention import AttentionOp, PagedAttentionOp
from mcore_kernels.protocols.dense import (
    ActivationOp,
    AddRmsNormOp,
    GeluOp,
    GluOp,
    L2NormOp,
    LayerNormOp,
    LinearOp,
    RmsNormOp,
    RopeOp,
    SwigluOp,
)
from mcore_kernels.protocols.dtypes import accumulation_dtype, rounded
from mcore_kernels.protocols.loss import VocabLossOp
from mcore_kernels.protocols.moe import GroupedLinearOp, MoePermuteOp, MoeRouteOp
from mcore_kernels.protocols.quant import Fp8GroupedOp, Fp8MatmulOp, QuantizeOp
from mcore_kernels.protocols.state_space import CausalConv1dOp, GatedDeltaRuleOp, SsdScanOp
from mcore_kernels.protocols.step import AdamOp, GradStatsOp, SampleOp

__all__ = [
    "ActivationOp",
    "AdamOp",
    "AddRmsNormOp",
    "AttentionOp",
    "CausalConv1dOp",
    "Fp8GroupedOp",
    "Fp8MatmulOp",
    "GatedDeltaRuleOp",
    "GeluOp",
    "GluOp",
    "GradStatsOp",
    "GroupedLinearOp",
    "L2NormOp",
    "LayerNormOp",
    "LinearOp",
    "MoePermuteOp",
    "MoeRouteOp",
    "PagedAttentionOp",
    "QuantizeOp",
    "RmsNormOp",
    "RopeOp",
    "SampleOp",
    "SsdScanOp",
    "SwigluOp",
    "VocabLossOp",
    "accumulation_dtype",
    "rounded",
]
