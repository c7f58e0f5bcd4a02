"""Attention from torch's FlexAttention (arXiv:2412.05496): soft caps and large heads on a GPU.

Its kernels are generated for what is asked: on a GPU torch's compiler writes them when a process
first needs a kind (head counts and sizes, dtype, scale, cap), which takes some seconds, and again
when lengths begin to vary. Nothing is tuned. On CPU the same masks and scores are evaluated one
after another, which takes the memory of all scores: it is there to be tested.

Which keys a query sees is an interval (`mcore_kernels.ops.attention.intervals`), whatever the
segments, the window and the causal diagonal are, so one kernel serves them all.

Shapes: T tokens, B segments of S tokens (packed: one of T), Q query heads, K kv heads, D head size
of queries and keys, Dv of values.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as evaluate
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from mcore_kernels.ops.attention.base import Attention, Plan, Segments, Visibility, merge_sinks
from mcore_kernels.ops.attention.intervals import MaskCache, block_mask
from mcore_kernels.ops.attention.packed import check_ends
from mcore_kernels.protocols import accumulation_dtype
from mcore_kernels.requirements import TRITON_PACKAGE
from mcore_kernels.target import Target

MAX_HEAD_DIM = 256
"""Tiles of larger ones (those of 512 were tried) do not fit on a processor of an H200."""

MIN_HEAD_DIM = 16
"""The kernels multiply no smaller matrices; smaller heads are filled up with zeros."""

VARIANTS = 64
"""How often a kind may be compiled: with and without gradients, lengths fixed and varying, …"""


class FlexAttention(Attention):
    """`mcore_kernels.protocols.AttentionOp` for every mask and cap; keeps the last masks built."""

    def __init__(self) -> None:
        """It begins with no masks."""
        self._masks = MaskCache()

    def plan(self, q: Tensor, k: Tensor, segments: Segments, visibility: Visibility) -> FlexPlan:
        """Build the mask, or find it among those of the last layouts."""
        # Reading the ends back from a GPU would wait for it, and a compiler knows no values.
        if not q.is_cuda and not torch.compiler.is_compiling():
            check_ends(q, k, segments)
        batch = 1 if segments.uniform is None else segments.uniform[0]
        if not q.numel() or not k.shape[0]:
            return FlexPlan(batch=batch, mask=None, visibility=visibility)
        mask = self._masks.get(block_mask, q, k, segments, visibility)
        return FlexPlan(batch=batch, mask=mask, visibility=visibility)


@dataclass(frozen=True, kw_only=True)
class FlexPlan(Plan):
    """The operator's arguments besides the tensors; without a mask there is nothing to see."""

    batch: int
    mask: BlockMask | None
    visibility: Visibility

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Plan`; the gradient is that of the generated kernel, with nothing done twice."""
        if self.mask is None:
            return super().attend(q, k, v, sinks)
        out, lse = self._run(q, k, v)
        if sinks is not None:
            out, lse = merge_sinks(out, lse, sinks)
        return out, lse.detach()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `Plan`."""
        if self.mask is None:
            lse = q.new_full(q.shape[:2], -torch.inf, dtype=accumulation_dtype(q.dtype))
            return q.new_zeros(*q.shape[:2], v.shape[2]), lse
        return self._run(q, k, v)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Plan`. These keys' own output and log-sum-exp are computed again for it.

        With the share a = exp(own lse - lse) of these keys in the softmax, the gradient of a score
        is p · a · (dO · v - dO · out), p the softmax over these keys alone. The kernel makes
        p · (dO' · v - dO' · own out + dl'): dO' is a · dO, and dl' what is missing.
        """
        if self.mask is None:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            own, own_lse = self._run(*leaves)
        wide = own_lse.dtype
        share = torch.where(own_lse == -torch.inf, 0.0, (own_lse - lse).exp()).detach()
        scaled = (grad_out.to(wide) * share.unsqueeze(-1)).to(grad_out.dtype)
        lean = (scaled.to(wide) * own.detach().to(wide)).sum(-1)
        lean -= share * (grad_out.to(wide) * out.to(wide)).sum(-1)
        dq, dk, dv = torch.autograd.grad((own, own_lse), leaves, (scaled, lean))
        return dq, dk, dv

    def _run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The output [T, Q, Dv] and log-sum-exp [T, Q] of these keys, differentiable."""
        assert self.mask is not None
        qh, kh, vh = (self._heads_first(x) for x in (q, k, v))
        scale, softcap = self.visibility.scale, self.visibility.softcap
        if not q.is_cuda:
            out, lse = _evaluated(qh, kh, vh, self.mask, scale, softcap)
        elif torch.compiler.is_compiling():
            out, lse = _attend(qh, kh, vh, self.mask, scale, softcap)
        else:
            kind = (*q.shape[1:], *v.shape[1:], str(q.dtype))
            run = _compiled(scale, softcap, kind)
            with torch._dynamo.config.patch(recompile_limit=VARIANTS):
                out, lse = kept_once(run, qh, kh, vh, self.mask)
        out = out.transpose(1, 2)[..., : v.shape[-1]]
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    def _heads_first(self, x: Tensor) -> Tensor:
        """[T, heads, D] → [B, heads, S, D or 16], a view where the last dim lies in one piece."""
        if x.shape[-1] < MIN_HEAD_DIM:
            x = F.pad(x, (0, MIN_HEAD_DIM - x.shape[-1]))
        x = x if x.stride(-1) == 1 else x.contiguous()
        return x.view(self.batch, x.shape[0] // self.batch, *x.shape[1:]).transpose(1, 2)


def has_triton() -> bool:
    """Whether kernels can be generated for a GPU here."""
    return TRITON_PACKAGE(Target()) is None


def _score_mod(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None

    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # tanh(x) as 2 sigmoid(2x) - 1: one exponential, and no overflow in its gradient.
        return softcap * (2.0 * torch.sigmoid(score * (2.0 / softcap)) - 1.0)

    return capped


def _attend(  # noqa: PLR0917 -- one argument more than the kernel's own
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    out, aux = flex_attention(
        q, k, v, score_mod=_score_mod(softcap), block_mask=mask, scale=scale, enable_gqa=True,
        kernel_options={"BACKEND": "TRITON"}, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    assert aux.lse is not None
    return out, aux.lse


@cache
def _compiled(scale: float, softcap: float | None, kind: tuple[Any, ...]) -> Callable[..., Any]:
    """`_attend` for one kind, compiled when it is first called.

    The compiler keeps what it made, and what it saw vary, by code object and its name: each kind
    gets its own, so that many models in a process do not use up the variants of one.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
        return _attend(q, k, v, mask, scale, softcap)

    name = re.sub(r"\W", "_", "_".join(map(str, ("attend", *kind, scale, softcap))))
    own = types.FunctionType(
        attend.__code__.replace(co_name=name), globals(), name, None, attend.__closure__
    )
    return torch.compile(own, fullgraph=True)


def kept_once(
    run: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, mask: BlockMask
) -> tuple[Tensor, Tensor]:
    """`run`, whose graph can be gone through again where `retain_graph` says so.

    What torch's compiler makes gives away memory in its backward pass, and refuses to keep a graph.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
        return run(q, k, v, mask)
    out, lse = _Kept.apply(q, k, v, mask, run)  # type: ignore[no-untyped-call]
    return out, lse


class _Kept(torch.autograd.Function):
    """A differentiable function with a graph of its own, which lives as long as this one does."""

    @staticmethod
    def forward(  # noqa: PLR0917 -- as `kept_once`
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask,
        run: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            results = run(*leaves, mask)
        ctx.graph = (results, leaves)
        out, lse = (one.detach() for one in results)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.graph is None:
            raise RuntimeError(
                "attention: its graph was gone through before and is freed; pass "
                "retain_graph=True the first time to go through it again"
            )
        (results, leaves), keep = ctx.graph, torch._C._autograd._get_current_graph_task_keep_graph()
        if not keep:
            ctx.graph = None
        with torch._functorch.config.patch(donated_buffer=False):
            found = torch.autograd.grad(results, leaves, grads, retain_graph=keep)
        return *found, None, None


def _evaluated(  # noqa: PLR0917 -- as `_attend`
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """What `flex_attention` does on CPU, with the gradient that it refuses there."""
    score_mod = _score_mod(softcap) or _plain
    out, lse, _ = evaluate(q, k, v, score_mod, mask.as_tuple(), scale, {})
    return out, lse * math.log(2.0)


def _plain(score: Tensor, *_: Tensor) -> Tensor:
    return score


FLEX = FlexAttention()
"""The operator."""
