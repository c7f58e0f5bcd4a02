"""Attention from cuDNN: what goes there, and that it is right there."""

import pytest
import torch

from mcore_kernels import Target, resolve
from mcore_kernels.ops.attention.base import Segments, Visibility
from mcore_kernels.ops.attention.cudnn import MIN_LENGTH, CudnnAttention, CudnnPlan
from mcore_kernels.ops.attention.flash import FlashPlan, aligned
from mcore_kernels.testing import spec

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a Hopper GPU",
    ),
]


def ends(count: int, length: int) -> torch.Tensor:
    return torch.arange(count + 1, dtype=torch.int32) * length


def segments(uniform: tuple[int, int] | None, longest: int) -> Segments:
    bounds = ends(2, longest)
    return Segments(
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        uniform=uniform,
    )


@pytest.mark.parametrize(
    ("uniform", "window", "size", "kind"),
    [
        ((2, 512), None, 64, CudnnPlan),
        ((2, MIN_LENGTH), None, 128, CudnnPlan),
        ((2, MIN_LENGTH - 1), None, 64, FlashPlan),  # as in decoding: another shape every time
        (None, None, 64, FlashPlan),
        ((2, 512), 100, 64, FlashPlan),
        ((2, 512), None, 60, FlashPlan),
        ((2, 512), None, 192, FlashPlan),
    ],
)
def test_who_serves_what(
    uniform: tuple[int, int] | None, window: int | None, size: int, kind: type
) -> None:
    q = torch.empty(1024, 4, size, device="meta")
    seen = Visibility(causal=True, window=window, scale=1.0)
    assert type(CudnnAttention().plan(q, q, segments(uniform, 512), seen)) is kind


def test_aligned_copies_only_what_it_must() -> None:
    rows = torch.randn(6, 48)
    for good in (rows[:, :32].view(6, 4, 8), rows[:, 16:].view(6, 4, 8)):
        assert aligned(good) is good
    for bad in (rows[:, 1:33].view(6, 4, 8), rows[:, ::2].view(6, 3, 8), rows.view(6, 12, 4)):
        copy = aligned(bad)
        assert copy is not bad
        assert torch.equal(copy, bad)


@pytest.mark.parametrize(
    ("shape", "causal", "dtype"),
    [
        pytest.param(shape, causal, dtype, marks=GPU)
        for shape in ((1, 128, 4, 4, 64), (2, 192, 8, 2, 128), (3, 257, 6, 2, 40))
        for causal in (True, False)
        for dtype in (torch.bfloat16, torch.float16)
    ],
)
def test_it_matches_the_specification(shape: tuple, causal: bool, dtype: torch.dtype) -> None:
    """q, k and v are columns of one fused projection, as a layer hands them over."""
    count, length, heads, kv_heads, size = shape
    op = resolve("attention", target=Target.of("cuda", dtype=dtype), require="cudnn")
    rows = torch.randn(count * length, (heads + 2 * kv_heads) * size, device="cuda").to(dtype)
    parts = rows.view(rows.shape[0], -1, size).split([heads, kv_heads, kv_heads], dim=1)
    q, k, v = (part.detach().requires_grad_() for part in parts)
    bounds = ends(count, length).cuda()
    arguments = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "causal": causal}
    out, lse = op(
        q, k, v, max_seqlen_q=length, max_seqlen_k=length, uniform=(count, length), **arguments
    )
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = spec.attention(*wide, **arguments)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-4)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-3
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    dy = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), dy)
    wanted = torch.autograd.grad(expected, wide, dy.double())
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        error = (one.double() - other).norm() / other.norm()
        assert error < tolerance / 2
    other_mask, _ = spec.attention(*wide, **(arguments | {"causal": not causal}))
    assert (out.double() - other_mask).norm() > tolerance * other_mask.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_backward_takes_a_merged_output() -> None:
    """As ring attention calls it: output and log-sum-exp over further keys than those given."""
    target = Target.of("cuda", dtype=torch.bfloat16)
    op = resolve("attention", target=target, require="cudnn")
    flash = resolve("attention", target=target, require="flash")
    q, k, v = (torch.randn(512, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bounds = ends(2, 256).cuda()
    shape = {
        "cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 256, "max_seqlen_k": 256,
        "uniform": (2, 256), "causal": False,
    }  # fmt: skip
    out, lse = op(q, k, v, **shape)
    merged, total = (out * 0.7).contiguous(), lse + 0.5
    dy = torch.randn_like(out)
    found = op.backward(dy, q, k, v, out=merged, lse=total, **shape)
    wanted = flash.backward(dy, q, k, v, out=merged, lse=total, **shape)
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other.double()).norm() / other.double().norm() < 1e-2
