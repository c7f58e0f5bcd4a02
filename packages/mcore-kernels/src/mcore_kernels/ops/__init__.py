"""The operators: one folder each, with its reference and its faster implementations."""

from collections.abc import Mapping
from types import MappingProxyType

from mcore_kernels.implementation import Operator
from mcore_kernels.ops import (
    activation,
    adam,
    add_rms_norm,
    attention,
    causal_conv1d,
    cross_entropy,
    fp8_grouped,
    fp8_matmul,
    gated_delta_rule,
    gelu,
    glu,
    grad_stats,
    grouped_linear,
    l2_norm,
    layer_norm,
    linear,
    moe_permute,
    moe_route,
    paged_attention,
    quantize,
    rms_norm,
    rope,
    sample,
    ssd_scan,
    swiglu,
)

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        one.name: one
        for one in (
            linear.OPERATOR,
            rms_norm.OPERATOR,
            add_rms_norm.OPERATOR,
            layer_norm.OPERATOR,
            l2_norm.OPERATOR,
            swiglu.OPERATOR,
            glu.OPERATOR,
            gelu.OPERATOR,
            activation.OPERATOR,
            rope.OPERATOR,
            attention.OPERATOR,
            paged_attention.OPERATOR,
            cross_entropy.OPERATOR,
            moe_route.OPERATOR,
            moe_permute.OPERATOR,
            grouped_linear.OPERATOR,
            causal_conv1d.OPERATOR,
            ssd_scan.OPERATOR,
            gated_delta_rule.OPERATOR,
            quantize.OPERATOR,
            fp8_matmul.OPERATOR,
            fp8_grouped.OPERATOR,
            adam.OPERATOR,
            grad_stats.OPERATOR,
            sample.OPERATOR,
        )
    }
)
"""Every operator by name."""
