"""Attention from the FlashAttention-2 kernels that torch's CUDA builds bring (arXiv:2307.08691).

Called by its own name rather than through `scaled_dot_product_attention`, which takes no packed
segments and keeps the log-sum-exp to itself. One launch serves all segments, and no length is
read back from the device.

Shapes: T tokens, N segments, Q query heads, K kv heads, D head size of queries and keys, Dv of
values, P the padded head size: max(D, Dv) rounded up to a multiple of 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_HEAD_DIM = 256


class FlashAttention:
    """`mcore_kernels.protocols.AttentionOp` on CUDA devices, for bfloat16 and float16."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        uniform: tuple[int, int] | None = None,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionOp`."""
        call = _Call(
            cu_seqlens=(cu_seqlens_q, cu_seqlens_k),
            max_seqlens=(max_seqlen_q, max_seqlen_k),
            uniform=uniform is not None,
            causal=causal,
            window=window,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
        )
        out, lse = _Attention.apply(q, k, v, call)  # type: ignore[no-untyped-call]
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        uniform: tuple[int, int] | None = None,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionOp`."""
        call = _Call(
            cu_seqlens=(cu_seqlens_q, cu_seqlens_k),
            max_seqlens=(max_seqlen_q, max_seqlen_k),
            uniform=uniform is not None,
            causal=causal,
            window=window,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
        )
        with torch.no_grad():
            return call.backward(grad_out, q, k, v, out=out, lse=lse)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        out, lse = call.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return (*ctx.call.backward(grads[0], q, k, v, out=out, lse=lse), None)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What the kernels take besides the tensors."""

    cu_seqlens: tuple[Tensor, Tensor]
    max_seqlens: tuple[int, int]
    uniform: bool
    causal: bool
    window: int | None
    scale: float

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"attention: window must be at least 1, got {self.window}")

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not q.numel() or not k.shape[0]:
            nothing = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
            return q.new_zeros(*q.shape[:2], v.shape[2]), nothing
        padded = _padded(q, k, v)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *padded,
            *self.cu_seqlens,
            *self.max_seqlens,
            0.0,
            self.causal,
            False,
            **self._keywords(),
        )
        out = out[..., : v.shape[-1]]
        # The kernel marks a query that sees no key by +inf.
        lse = lse.t().masked_fill(lse.t() == torch.inf, -torch.inf)
        stray = self._stray(q, self.cu_seqlens[0])
        if stray is not None:
            out = out.masked_fill(stray[:, None, None], 0.0)
            lse = lse.masked_fill(stray[:, None], -torch.inf)
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not q.numel() or not k.shape[0]:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        padded = _padded(q, k, v)
        size = padded[0].shape[-1]
        heads_first = lse.t().masked_fill(lse.t() == -torch.inf, torch.inf).contiguous()
        unused = q.new_zeros(2, dtype=torch.uint64)  # the state of the dropout that is not done
        grads = torch.ops.aten._flash_attention_backward(
            _pad(grad_out, size), *padded, _pad(out, size), heads_first, *self.cu_seqlens,
            *self.max_seqlens, 0.0, self.causal, unused, unused, **self._keywords(),
        )  # fmt: skip
        results = []
        for like, grad, ends in zip(
            (q, k, v), grads, (self.cu_seqlens[0], self.cu_seqlens[1], self.cu_seqlens[1]),
            strict=True,
        ):  # fmt: skip
            grad = grad[..., : like.shape[-1]]
            stray = self._stray(like, ends)
            results.append(grad if stray is None else grad.masked_fill(stray[:, None, None], 0.0))
        return results[0], results[1], results[2]

    def _keywords(self) -> dict[str, Any]:
        keywords: dict[str, Any] = {"scale": self.scale}
        if self.window is not None:
            keywords["window_size_left"] = self.window - 1
            keywords["window_size_right"] = 0 if self.causal else self.window - 1
        return keywords

    def _stray(self, x: Tensor, ends: Tensor) -> Tensor | None:
        """Mask [T] of the rows past the last segment, which the kernel leaves as they were."""
        if self.uniform:
            return None
        return torch.arange(x.shape[0], device=x.device) >= ends[-1]


def _padded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with the head size P: zeros change neither a score nor a used output."""
    size = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    return _pad(q, size), _pad(k, size), _pad(v, size)


def _pad(x: Tensor, size: int) -> Tensor:
    # The kernel wants neighbouring elements in the last dim; gradients may come expanded.
    x = x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()
