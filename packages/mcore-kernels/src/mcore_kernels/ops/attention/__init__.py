"""Softmax attention over packed segments: `mcore_kernels.protocols.AttentionOp`."""

import torch

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.attention.cudnn import MAX_HEAD_DIM as CUDNN_HEAD_DIM
from mcore_kernels.ops.attention.cudnn import CudnnAttention
from mcore_kernels.ops.attention.flash import MAX_HEAD_DIM, FlashAttention
from mcore_kernels.ops.attention.flex import FLEX
from mcore_kernels.ops.attention.flex import MAX_HEAD_DIM as FLEX_HEAD_DIM
from mcore_kernels.ops.attention.reference import REFERENCE
from mcore_kernels.ops.attention.sdpa import SdpaAttention
from mcore_kernels.requirements import (
    TRITON_PACKAGE,
    needs_arch,
    needs_device,
    needs_dtype,
    needs_head_dim,
    needs_package,
    on_cuda,
)

FLASH4_HEAD_DIM = 128
"""Its largest head size that both Hopper and Blackwell have kernels for."""

OPERATOR = Operator(
    "attention",
    (
        Implementation(
            op="attention",
            name="reference",
            fn=REFERENCE,
            summary="matrix products; a score matrix per head and segment",
        ),
        Implementation(
            op="attention",
            name="sdpa",
            fn=SdpaAttention(),
            requires=(
                needs_device("cpu"),
                needs_dtype(torch.float32, torch.float64, torch.bfloat16, torch.float16),
            ),
            priority=10,
            summary="the fused kernel of torch's scaled_dot_product_attention on CPU; "
            "soft-capped scores go to the reference",
        ),
        Implementation(
            op="attention",
            name="flex",
            fn=FLEX,
            requires=(
                needs_device("cpu", "cuda"),
                needs_head_dim(maximum=FLEX_HEAD_DIM),
                on_cuda(
                    needs_arch((8, 0)), needs_dtype(torch.bfloat16, torch.float16), TRITON_PACKAGE
                ),
            ),
            priority=5,
            summary="torch's FlexAttention for every mask and cap, compiled when first used; on "
            "CPU it evaluates all scores, to be tested",
        ),
        Implementation(
            op="attention",
            name="flash",
            fn=FlashAttention(),
            requires=(
                needs_device("cuda"),
                needs_arch((8, 0)),
                needs_dtype(torch.bfloat16, torch.float16),
                needs_head_dim(maximum=MAX_HEAD_DIM),
            ),
            priority=20,
            summary="the FlashAttention-2 kernels of torch's CUDA builds, all segments at once; "
            "soft-capped scores go to flex, short ones to the reference",
        ),
        Implementation(
            op="attention",
            name="cudnn",
            fn=CudnnAttention(),
            requires=(
                needs_device("cuda"),
                needs_arch((9, 0)),
                needs_dtype(torch.bfloat16, torch.float16),
                needs_head_dim(maximum=CUDNN_HEAD_DIM, multiple=8),
            ),
            priority=30,
            summary="cuDNN for long segments of equal length; others go to flash",
        ),
        Implementation(
            op="attention",
            name="flash4",
            fn="mcore_kernels.ops.attention.flash4:ATTENTION",
            requires=(
                needs_device("cuda"),
                needs_arch((9, 0)),
                needs_dtype(torch.bfloat16, torch.float16),
                needs_head_dim(maximum=FLASH4_HEAD_DIM, multiple=64),
                needs_package("flash_attn.cute", "4.0.0", distribution="flash-attn-4"),
            ),
            priority=40,
            summary="FlashAttention-4, all segments at once; compiled when first used; other head "
            "sizes than 64 and 128 go to flash",
        ),
        Implementation(
            op="attention",
            name="invariant",
            fn="mcore_kernels.ops.attention.invariant:INVARIANT",
            priority=-1,
            summary="by name only: a query depends on the keys it sees alone",
        ),
    ),
)
