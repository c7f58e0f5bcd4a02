"""Operators of transformer and state-space models, each chosen once and with a reason."""

from mcore_kernels.config import KernelConfig
from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.kernels import Kernels
from mcore_kernels.ops import OPERATORS
from mcore_kernels.ops.adam.rule import AdamRule
from mcore_kernels.ops.cross_entropy.changes import LogitsChange, SoftCap
from mcore_kernels.ops.cross_entropy.head import HeadLoss, fused_head_log_probs, fused_head_loss
from mcore_kernels.ops.cross_entropy.loss import LossTerms, VocabLoss, VocabShard, vocab_loss
from mcore_kernels.ops.moe_permute.assignment import Assignment, limit_capacity
from mcore_kernels.ops.moe_route.rule import RoutingRule, jitter, sinkhorn
from mcore_kernels.ops.rope.angles import rope_cos_sin
from mcore_kernels.ops.rope.scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)
from mcore_kernels.ops.sample.logits import penalise, token_logprobs, uniforms
from mcore_kernels.protocols import (
    ActivationOp,
    AdamOp,
    AddRmsNormOp,
    AttentionOp,
    CausalConv1dOp,
    Fp8MatmulOp,
    GatedDeltaRuleOp,
    GeluOp,
    GluOp,
    GradStatsOp,
    GroupedLinearOp,
    L2NormOp,
    LayerNormOp,
    LinearOp,
    MoePermuteOp,
    MoeRouteOp,
    PagedAttentionOp,
    QuantizeOp,
    RmsNormOp,
    RopeOp,
    SampleOp,
    SsdScanOp,
    SwigluOp,
    VocabLossOp,
    accumulation_dtype,
)
from mcore_kernels.registry import Resolved, Row, explain, resolve
from mcore_kernels.target import Target

__all__ = [
    "OPERATORS",
    "ActivationOp",
    "AdamOp",
    "AdamRule",
    "AddRmsNormOp",
    "Assignment",
    "AttentionOp",
    "CausalConv1dOp",
    "Fp8MatmulOp",
    "GatedDeltaRuleOp",
    "GeluOp",
    "GluOp",
    "GradStatsOp",
    "GroupedLinearOp",
    "HeadLoss",
    "Implementation",
    "KernelConfig",
    "Kernels",
    "L2NormOp",
    "LayerNormOp",
    "LinearOp",
    "LinearScaling",
    "Llama3Scaling",
    "LogitsChange",
    "LongRopeScaling",
    "LossTerms",
    "MoePermuteOp",
    "MoeRouteOp",
    "Operator",
    "PagedAttentionOp",
    "QuantizeOp",
    "Resolved",
    "RmsNormOp",
    "RopeOp",
    "RopeScaling",
    "RoutingRule",
    "Row",
    "SampleOp",
    "SoftCap",
    "SsdScanOp",
    "SwigluOp",
    "Target",
    "VocabLoss",
    "VocabLossOp",
    "VocabShard",
    "YarnScaling",
    "accumulation_dtype",
    "explain",
    "fused_head_log_probs",
    "fused_head_loss",
    "jitter",
    "limit_capacity",
    "penalise",
    "resolve",
    "rope_cos_sin",
    "sinkhorn",
    "token_logprobs",
    "uniforms",
    "vocab_loss",
]
