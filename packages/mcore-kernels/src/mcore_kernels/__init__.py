"""Operators of transformer and state-space models, each chosen once and with a reason."""

from mcore_kernels.config import KernelConfig
from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.kernels import Kernels
from mcore_kernels.ops import OPERATORS
from mcore_kernels.ops.cross_entropy.head import HeadLoss, fused_head_log_probs, fused_head_loss
from mcore_kernels.ops.cross_entropy.loss import LossTerms, VocabLoss, VocabShard, vocab_loss
from mcore_kernels.ops.rope.angles import rope_cos_sin
from mcore_kernels.ops.rope.scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)
from mcore_kernels.protocols import (
    ActivationOp,
    AddRmsNormOp,
    AttentionOp,
    CausalConv1dOp,
    GeluOp,
    GluOp,
    L2NormOp,
    LayerNormOp,
    LinearOp,
    RmsNormOp,
    RopeOp,
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
    "AddRmsNormOp",
    "AttentionOp",
    "CausalConv1dOp",
    "GeluOp",
    "GluOp",
    "HeadLoss",
    "Implementation",
    "KernelConfig",
    "Kernels",
    "L2NormOp",
    "LayerNormOp",
    "LinearOp",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "LossTerms",
    "Operator",
    "Resolved",
    "RmsNormOp",
    "RopeOp",
    "RopeScaling",
    "Row",
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
    "resolve",
    "rope_cos_sin",
    "vocab_loss",
]
