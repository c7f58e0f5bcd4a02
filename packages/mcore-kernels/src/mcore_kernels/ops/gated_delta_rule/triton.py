"""The gated delta rule in Triton. Imported only when it is chosen, because it imports triton.

Forward: the triangular systems of all chunks side by side, states from chunk to chunk (a program
for each document, head and columns of its state), then all outputs side by side. Only arguments are
kept: the backward solves the systems and makes the states again, carries their gradients the other
way, and then takes all chunks side by side once more. Chunks of the two are as long as suits each.
Numbers of 16 bits are multiplied as such and summed in float32. Nothing is added in an order that
could change.

Shapes: T tokens, N documents, K key heads of size D, h heads with values of size Dv, r = h / K;
C chunks of L rows.
"""

# ruff: noqa: PLR0917 -- operators of torch take what they are given by position

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary, on_device
from mcore_kernels.ops.chunks_triton import (
    Chunks,
    chunk_length,
    lying,
    matrix_options,
    of_dtype,
    padded,
)
from mcore_kernels.ops.gated_delta_rule.base import check
from mcore_kernels.ops.gated_delta_rule.triton_gradients import (
    carry_back_kernel,
    gradients_kernel,
    own_gradients_kernel,
)
from mcore_kernels.ops.gated_delta_rule.triton_kernels import (
    carry_kernel,
    outputs_kernel,
    solve_kernel,
    totals_kernel,
)
from mcore_kernels.tuning import tuned


class _Launch:
    """What the kernels of one direction share: chunks, sizes, and the sums of logarithms."""

    def __init__(
        self, kernel: str, q: Tensor, v: Tensor, g: Tensor, ends: Tensor, limits: tuple[int, int]
    ) -> None:
        exact = q.dtype == torch.float32
        self.q = q
        rows, self.heads, self.v = v.shape
        self.keys, self.d = q.shape[1:]
        self.share = self.heads // self.keys
        self.documents = ends.shape[0] - 1
        (length,) = self._tuned(kernel, "length")
        self.chunks = Chunks.of(ends, rows, chunk_length(length, self.d, limits))
        self.matrix = {"PAIR": exact, **matrix_options(q)}
        self.total = g.new_empty(1 + exact, self.heads, rows, dtype=torch.float32)
        block = min(32, triton.next_power_of_2(self.heads))
        totals_kernel[(self.chunks.most, triton.cdiv(self.heads, block))](
            g.contiguous(), self.total, *self.chunks.arguments(), self.heads,
            LENGTH=self.chunks.length, HEADS=block, PAIR=exact,
        )  # fmt: skip

    def _tuned(self, kernel: str, *names: str) -> tuple[int, ...]:
        return tuned(of_dtype(kernel, self.q), self.q.device, *names)

    def constants(self, kernel: str, columns: int | None = None) -> dict[str, Any]:
        """Constants of a kernel that takes `columns` of values at a time, or what suits it."""
        if columns is None:
            (columns,) = self._tuned(kernel, "columns")
        warps, stages = self._tuned(kernel, "warps", "stages")
        return {
            "LENGTH": self.chunks.length,
            "D": padded(self.d),
            "V": min(columns, padded(self.v)),
            **self.matrix,
            "num_warps": warps,
            "num_stages": stages,
        }

    def sizes(self) -> tuple[int, int, int, int]:
        """Integers that all kernels but the first take."""
        return self.heads, self.share, self.d, self.v

    def solve(self, k: Tensor, v: Tensor, beta: Tensor, *, keep: bool) -> tuple[Tensor, ...]:
        """U [T, h, Dv] and W [T, h, D], and with `keep` the inverses [C, h, L, L], in v's dtype."""
        square = (self.chunks.most, self.heads, self.chunks.length, self.chunks.length)
        system = self.total.new_empty(square)
        inverse = v.new_empty(square) if keep else system
        own, seen = v.new_empty(v.shape), v.new_empty(*v.shape[:2], self.d)
        solve_kernel[square[:2]](
            k, v, beta, self.total, system, inverse, own, seen, *self.chunks.arguments(),
            *self.sizes(), *k.stride()[:2], *v.stride()[:2], KEEP=keep,
            **self.constants("gated_delta_rule_solve", padded(self.v)),
        )  # fmt: skip
        return own, seen, inverse

    def carry(
        self, k: Tensor, own: Tensor, seen: Tensor, initial: Tensor | None, final: Tensor
    ) -> Tensor:
        """The states before each chunk [C, h, D, Dv], in k's dtype; U becomes u, `final` is set."""
        before = k.new_empty(self.chunks.most, *final.shape[1:])
        if self.documents:
            constants = self.constants("gated_delta_rule_carry")
            grid = (self.documents * self.heads, triton.cdiv(self.v, constants["V"]))
            carry_kernel[grid](
                k, self.total, own, seen, final if initial is None else initial.contiguous(),
                before, final, self.chunks.ends, self.chunks.first, self.chunks.rows,
                *self.sizes(), *k.stride()[:2], INITIAL=initial is not None, **constants,
            )  # fmt: skip
        return before

    def grid(self, constants: dict[str, Any]) -> tuple[int, int, int]:
        """Of kernels that take chunks, and V columns of each, side by side."""
        return self.chunks.most, self.heads, triton.cdiv(self.v, constants["V"])


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    ends: Tensor,
    scale: float,
    limits: list[int],
) -> tuple[Tensor, Tensor]:
    y, states = _forward_fake(q, k, v, g, beta, initial, ends, scale, limits)
    if not v.numel() or not q.shape[2]:
        return y.zero_(), states.zero_() if initial is None else states.copy_(initial)
    q, k, v = lying(q), lying(k), lying(v)
    with on_device(q):
        of = _Launch("gated_delta_rule", q, v, g, ends, (limits[0], limits[1]))
        own, seen, _ = of.solve(k, v, beta.contiguous(), keep=False)
        before = of.carry(k, own, seen, initial, states)
        constants = of.constants("gated_delta_rule")
        outputs_kernel[of.grid(constants)](
            q, k, of.total, own, before, y, *of.chunks.arguments(), *of.sizes(), scale,
            *q.stride()[:2], *k.stride()[:2], **constants,
        )  # fmt: skip
    return y, states


def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    ends: Tensor,
    scale: float,
    limits: list[int],
) -> tuple[Tensor, Tensor]:
    states = (ends.shape[0] - 1, v.shape[1], q.shape[2], v.shape[2])
    return v.new_empty(v.shape), v.new_empty(states, dtype=torch.float32)


def _backward(
    dy: Tensor,
    dstates: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    ends: Tensor,
    scale: float,
    limits: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta and the initial states."""
    if not v.numel() or not q.shape[2]:
        found = _backward_fake(dy, dstates, q, k, v, g, beta, initial, ends, scale, limits)
        return *(one.zero_() for one in found[:5]), found[5].copy_(dstates)  # type: ignore[return-value]
    dy, q, k, v, beta = lying(dy), lying(q), lying(k), lying(v), beta.contiguous()
    dv, dg, dbeta = (one.new_empty(one.shape) for one in (v, g, beta))
    with on_device(q):
        of = _Launch("gated_delta_rule_backward", q, v, g, ends, (limits[0], limits[1]))
        written, seen, inverse = of.solve(k, v, beta, keep=True)
        dinitial = torch.empty_like(dstates, memory_format=torch.contiguous_format)
        before = of.carry(k, written, seen, initial, dinitial)  # its last states are of no use
        behind, dwritten = torch.empty_like(before), torch.empty_like(written)
        strides = (*dy.stride()[:2], *q.stride()[:2], *k.stride()[:2])
        constants = of.constants("gated_delta_rule")
        own_gradients_kernel[of.grid(constants)](
            dy, q, k, of.total, dwritten, *of.chunks.arguments(), *of.sizes(), scale, *strides,
            **constants,
        )  # fmt: skip
        if of.documents:
            constants = of.constants("gated_delta_rule_carry")
            carry_back_kernel[of.documents * of.heads, of.grid(constants)[2]](
                dy, q, k, of.total, dwritten, seen, dstates.contiguous(), behind, dinitial,
                of.chunks.ends, of.chunks.first, of.chunks.rows, *of.sizes(), scale, *strides,
                **constants,
            )  # fmt: skip
        # Key heads that are read by several: of each by itself, then the sums.
        kind = q.dtype if of.share == 1 else torch.float32
        parts = [q.new_empty(of.share, *q.shape, dtype=kind) for _ in range(2)]
        gradients_kernel[of.grid(constants)[:2]](
            dy, q, k, v, beta, of.total, inverse, written, dwritten, before, behind, *parts, dv,
            dg, dbeta, *of.chunks.arguments(), *of.sizes(), scale, *strides, *v.stride()[:2],
            **of.constants("gated_delta_rule_backward"),
        )  # fmt: skip
    dq, dk = (one[0] if of.share == 1 else one.sum(0).to(q.dtype) for one in parts)
    return dq, dk, dv, dg, dbeta, dinitial if initial is None else dinitial.to(initial.dtype)


def _backward_fake(
    dy: Tensor, dstates: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = (*given[:5], dstates if given[5] is None else given[5])
    return tuple(one.new_empty(one.shape) for one in like)


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial, Tensor ends, "
    "float scale, int[] limits"
)
_LIBRARY = OpLibrary()
_rule = _LIBRARY.define(
    f"gated_delta_rule({_ARGUMENTS}) -> (Tensor, Tensor)", _forward, fake=_forward_fake
)
_rule_backward = _LIBRARY.define(
    f"gated_delta_rule_backward(Tensor dy, Tensor dstates, {_ARGUMENTS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    fake=_backward_fake,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.rest = inputs[7:]


def _gradients(ctx: Any, dy: Tensor, dstates: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    found = list(_rule_backward(dy, dstates, *saved, *ctx.rest))
    return *found[:5], None if saved[5] is None else found[5], None, None, None


_LIBRARY.differentiate("gated_delta_rule", _gradients, keep=_keep)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    uniform: tuple[int, int] | None = None,
    scale: float | None = None,
    initial_states: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """See `mcore_kernels.protocols.GatedDeltaRuleOp`; ValueError for shapes that do not fit.

    Of 16-bit inputs, states and what their chunks write are rounded to 16 bits where they are
    multiplied; they are carried in float32. Memory beside results: a state of 16 bits for each
    chunk, in the backward its gradient too (of float32 inputs, in float32). Chunks have
    `chunk_size` tokens at most, and fewer where the kernel is faster with them.
    """
    check(
        q, k, v, g, beta, cu_seqlens=cu_seqlens, uniform=uniform, initial_states=initial_states,
        chunk_size=chunk_size,
    )  # fmt: skip
    longest = max_seqlen if uniform is None else uniform[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    found: tuple[Tensor, Tensor] = _rule(
        q, k, v, g, beta, initial_states, cu_seqlens.contiguous(), scale, [chunk_size, longest]
    )
    return found
