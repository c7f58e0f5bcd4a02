"""Partial results of the softmax loss in Triton. Imported only when it is chosen.

Each method reads the logits once; no copy of them in float32 is made.
Shapes: T tokens, V columns of this shard. A program of the forward takes one row, one of the
backward BLOCK columns of a row.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take pointers and strides by position

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary, on_device
from mcore_kernels.ops.cross_entropy.reference import ReferenceVocabLoss
from mcore_kernels.tuning import tuned


def _options(z: Tensor) -> dict[str, int]:
    most, warps = tuned("cross_entropy", z.device, "block", "warps")
    return {"BLOCK": min(most, triton.next_power_of_2(z.shape[1])), "num_warps": warps}


@triton.jit
def _max_kernel(z_ptr, max_ptr, stride, v, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    broken = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, v, BLOCK):
        col = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * stride + col, mask=col < v, other=float("-inf")).to(tl.float32)
        broken |= (z != z).to(tl.int32)  # noqa: PLR0124 -- NaN, which a maximum passes over
        best = tl.maximum(best, z)
    result = tl.max(best, axis=0)
    tl.store(max_ptr + row, tl.where(tl.max(broken, axis=0) > 0, float("nan"), result))


@triton.jit
def _partials_kernel(
    z_ptr, label_ptr, max_ptr, out_ptr, stride, t, v, SMOOTHING: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    m = tl.load(max_ptr + row)
    label = tl.load(label_ptr + row)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    totals = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, v, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < v
        z = tl.load(z_ptr + row * stride + col, mask=mask, other=float("-inf")).to(tl.float32) - m
        sums += tl.where(mask, tl.exp(z), 0.0)
        if SMOOTHING:
            totals += tl.where(mask, z, 0.0)
    here = (label >= 0) & (label < v)
    target = tl.load(z_ptr + row * stride + tl.where(here, label, 0)).to(tl.float32) - m
    tl.store(out_ptr + row, tl.sum(sums, axis=0))
    tl.store(out_ptr + t + row, tl.where(here, target, 0.0))
    tl.store(out_ptr + 2 * t + row, tl.sum(totals, axis=0))


@triton.jit
def _statistics_kernel(z_ptr, label_ptr, max_ptr, out_ptr, stride, t, v, BLOCK: tl.constexpr):
    # The sum so far is that of exp(z - m), with the largest logit m so far (Milakov and Gimelshein
    # 2018, arXiv:1805.02867). Where none was above -inf yet, 0 takes its place.
    row = tl.program_id(0).to(tl.int64)
    m = float("-inf")
    total = 0.0
    for start in range(0, v, BLOCK):
        col = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * stride + col, mask=col < v, other=float("-inf")).to(tl.float32)
        above = tl.maximum(m, tl.max(z, axis=0))
        base = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp(m - base) + tl.sum(tl.exp(z - base), axis=0)
        m = above
    label = tl.load(label_ptr + row)
    here = (label >= 0) & (label < v)
    target = tl.load(z_ptr + row * stride + tl.where(here, label, 0)).to(tl.float32) - m
    tl.store(max_ptr + row, m)
    tl.store(out_ptr + row, total)
    tl.store(out_ptr + t + row, tl.where(here, target, 0.0))
    tl.store(out_ptr + 2 * t + row, 0.0)


@triton.jit
def _moments_kernel(z_ptr, max_ptr, out_ptr, stride, v, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    m = tl.load(max_ptr + row)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, v, BLOCK):
        col = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * stride + col, mask=col < v, other=float("-inf")).to(tl.float32)
        x = z - m
        sums += tl.exp(x) * tl.where(x == float("-inf"), 0.0, x)
    tl.store(out_ptr + row, tl.sum(sums, axis=0))


@triton.jit
def _gradient_kernel(
    z_ptr,
    label_ptr,
    max_ptr,
    sum_ptr,
    softmax_ptr,
    surprise_ptr,
    target_ptr,
    all_ptr,
    out_ptr,
    stride,
    stride_out,
    v,
    SURPRISE: tl.constexpr,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < v
    m, s, label = tl.load(max_ptr + row), tl.load(sum_ptr + row), tl.load(label_ptr + row)
    z = tl.load(z_ptr + row * stride + col, mask=mask, other=0.0).to(tl.float32)
    x = z - m
    factor = tl.load(softmax_ptr + row)
    if SURPRISE:
        factor += tl.load(surprise_ptr + row) * tl.where(x == float("-inf"), 0.0, x)
    dz = tl.exp(x) / s * factor - tl.where(col == label, tl.load(target_ptr + row), 0.0)
    if ALL:
        dz -= tl.load(all_ptr + row)
    tl.store(out_ptr + row * stride_out + col, dz.to(out_ptr.dtype.element_ty), mask=mask)


def _local_max(logits: Tensor) -> Tensor:
    result = logits.new_empty(logits.shape[0], dtype=torch.float32)
    z = _rows(logits)
    with on_device(z):
        _max_kernel[(z.shape[0],)](z, result, z.stride(0), z.shape[1], **_options(z))
    return result


def _partials(logits: Tensor, labels: Tensor, maximum: Tensor, smoothing: bool) -> Tensor:
    result = maximum.new_empty(3, logits.shape[0])
    z = _rows(logits)
    with on_device(z):
        _partials_kernel[(z.shape[0],)](
            z, labels.contiguous(), maximum.contiguous(), result, z.stride(0), *z.shape,
            SMOOTHING=smoothing, **_options(z),
        )  # fmt: skip
    return result


def _statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    z = _rows(logits)
    maximum = z.new_empty(z.shape[0], dtype=torch.float32)
    result = maximum.new_empty(3, z.shape[0])
    with on_device(z):
        _statistics_kernel[(z.shape[0],)](
            z, labels.contiguous(), maximum, result, z.stride(0), *z.shape, **_options(z)
        )
    return maximum, result


def _moments(logits: Tensor, maximum: Tensor) -> Tensor:
    z, result = _rows(logits), maximum.new_empty(maximum.shape)
    with on_device(z):
        _moments_kernel[(z.shape[0],)](
            z, maximum.contiguous(), result, z.stride(0), z.shape[1], **_options(z)
        )
    return result


def _gradient(
    logits: Tensor, labels: Tensor, maximum: Tensor, sum_exp: Tensor, on_softmax: Tensor,
    on_surprise: Tensor | None, on_target: Tensor, on_all: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    z = _rows(logits)
    count, v = z.shape
    given = (on_softmax, on_surprise, on_target, on_all)
    softmax, surprise, target, everywhere = (
        maximum if one is None else one.to(torch.float32).contiguous() for one in given
    )
    options = _options(z)
    with on_device(z):
        _gradient_kernel[(count, triton.cdiv(v, options["BLOCK"]))](
            z, labels.contiguous(), maximum.contiguous(), sum_exp.contiguous(), softmax,
            surprise, target, everywhere, out, z.stride(0), out.stride(0), v,
            SURPRISE=on_surprise is not None, ALL=on_all is not None, **options,
        )  # fmt: skip


def _row_fake(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


def _partials_fake(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(3, logits.shape[0], dtype=torch.float32)


def _statistics_fake(logits: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _row_fake(logits), _partials_fake(logits)


_LIBRARY = OpLibrary()
_local_max_op = _LIBRARY.when_compiled(
    "loss_local_max(Tensor logits) -> Tensor", _local_max, fake=_row_fake
)
_partials_op = _LIBRARY.when_compiled(
    "loss_partials(Tensor logits, Tensor labels, Tensor maximum, bool smoothing) -> Tensor",
    _partials,
    fake=_partials_fake,
)
_statistics_op = _LIBRARY.when_compiled(
    "loss_statistics(Tensor logits, Tensor labels) -> (Tensor, Tensor)",
    _statistics,
    fake=_statistics_fake,
)
_moments_op = _LIBRARY.when_compiled(
    "loss_moments(Tensor logits, Tensor maximum) -> Tensor", _moments, fake=_row_fake
)
_gradient_op = _LIBRARY.when_compiled(
    "loss_gradient(Tensor logits, Tensor labels, Tensor maximum, Tensor sum_exp, "
    "Tensor on_softmax, Tensor? on_surprise, Tensor on_target, Tensor? on_all, Tensor(a!) out) "
    "-> ()",
    _gradient,
    fake=lambda *_: None,
)


class TritonVocabLoss(ReferenceVocabLoss):
    """`mcore_kernels.protocols.VocabLossOp`; logits in float64 are served by the reference."""

    def local_max(self, logits: Tensor) -> Tensor:
        """See `VocabLossOp`."""
        if not _served(logits):
            return super().local_max(logits)
        return _local_max_op(logits)

    def partials(
        self, logits: Tensor, labels: Tensor, maximum: Tensor, *, smoothing: bool
    ) -> Tensor:
        """See `VocabLossOp`."""
        if not _served(logits):
            return super().partials(logits, labels, maximum, smoothing=smoothing)
        return _partials_op(logits, labels, maximum, smoothing)

    def statistics(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return `local_max` and `partials` with it, without smoothing, of one read of the logits.

        A logit that is NaN shows in the sum, not in the maximum.
        """
        if not _served(logits):
            maximum = self.local_max(logits)
            return maximum, self.partials(logits, labels, maximum, smoothing=False)
        return _statistics_op(logits, labels)

    def moments(self, logits: Tensor, maximum: Tensor) -> Tensor:
        """See `VocabLossOp`."""
        if not _served(logits):
            return super().moments(logits, maximum)
        return _moments_op(logits, maximum)

    def gradient(
        self,
        logits: Tensor,
        labels: Tensor,
        maximum: Tensor,
        sum_exp: Tensor,
        *,
        on_softmax: Tensor,
        on_surprise: Tensor | None,
        on_target: Tensor,
        on_all: Tensor | None,
        out: Tensor,
    ) -> None:
        """See `VocabLossOp`."""
        if not _served(logits) or out.stride(1) != 1:
            super().gradient(
                logits, labels, maximum, sum_exp, on_softmax=on_softmax, on_surprise=on_surprise,
                on_target=on_target, on_all=on_all, out=out,
            )  # fmt: skip
            return
        _gradient_op(
            logits, labels, maximum, sum_exp, on_softmax, on_surprise, on_target, on_all, out
        )


def _served(logits: Tensor) -> bool:
    return logits.numel() > 0 and logits.dtype != torch.float64


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


VOCAB_LOSS = TritonVocabLoss()
"""The operator; it holds no state."""
