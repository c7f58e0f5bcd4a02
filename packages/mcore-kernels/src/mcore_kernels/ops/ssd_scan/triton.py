"""The state-space scan in Triton. Imported only when it is chosen, because it imports triton.

Forward: sums of logarithms, states from chunk to chunk (a program for each document, head and tile
of its state), then all chunks side by side. Only arguments are kept: the backward makes the states
again, carries their gradients the other way, and then takes all chunks side by side once more.
Chunks of the two are as long as suits each. Numbers of 16 bits are multiplied as such and summed in
float32. Nothing is added in an order that could change.

Shapes: T tokens, N documents, h heads of size P, G groups, S state size; K chunks.
"""

# ruff: noqa: PLR0917 -- operators of torch take what they are given by position

from __future__ import annotations

import math
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
from mcore_kernels.ops.ssd_scan.base import check, step_sizes
from mcore_kernels.ops.ssd_scan.triton_kernels import (
    carry_kernel,
    input_gradients_kernel,
    outputs_kernel,
    state_gradients_kernel,
    totals_kernel,
)
from mcore_kernels.tuning import tuned


class _Launch:
    """What the kernels of one direction share: chunks, sizes, and the sums of logarithms."""

    def __init__(
        self, kernel: str, x: Tensor, step: Tensor, a_log: Tensor, b: Tensor, ends: Tensor,
        limits: tuple[int, int],
    ) -> None:  # fmt: skip
        exact = x.dtype == torch.float32
        length, heads, warps, stages = tuned(
            of_dtype(kernel, x), x.device, "length", "heads", "warps", "stages"
        )
        rows, self.heads, self.p = x.shape
        self.groups, self.s = b.shape[1:]
        self.share = self.heads // self.groups
        self.documents = ends.shape[0] - 1
        self.chunks = Chunks.of(ends, rows, chunk_length(length, self.s, limits))
        self.of_program = min(heads, self.share)
        self.blocks = triton.cdiv(self.share, self.of_program)
        self.pair = exact
        self.matrix = matrix_options(x)
        self.device = x.device
        self.options = {"num_warps": warps, "num_stages": stages}
        self.step = step.new_empty(self.heads, rows)
        self.total = step.new_empty(1 + exact, self.heads, rows)
        block = min(32, triton.next_power_of_2(self.heads))
        totals_kernel[(self.chunks.most, triton.cdiv(self.heads, block))](
            step.contiguous(), a_log.contiguous(), self.step, self.total, *self.chunks.arguments(),
            self.heads, LENGTH=self.chunks.length, HEADS=block, PAIR=exact,
        )  # fmt: skip

    def carry(
        self, x: Tensor, b: Tensor, initial: Tensor | None, *, back: bool
    ) -> tuple[Tensor, Tensor]:
        """The states at each chunk [K, h, P, S], in the dtype of b, and the last [N, h, P, S]."""
        states = b.new_empty(self.chunks.most, self.heads, self.p, self.s)
        final = self.step.new_empty(self.documents, self.heads, self.p, self.s)
        most_p, most_s, warps, stages = tuned(
            "ssd_scan_carry", self.device, "p", "s", "warps", "stages"
        )
        p, s = min(most_p, padded(self.p)), min(most_s, padded(self.s))
        tiles = triton.cdiv(self.p, p) * triton.cdiv(self.s, s)
        if final.numel():
            carry_kernel[(self.documents * self.heads, tiles)](
                x, b, self.step, self.total, final if initial is None else initial.contiguous(),
                states, final, self.chunks.ends, self.chunks.first, self.chunks.rows, self.heads,
                self.share, self.p, self.s, *x.stride()[:2], *b.stride()[:2],
                INITIAL=initial is not None, BACK=back, LENGTH=self.chunks.length, P=p, S=s,
                PAIR=self.pair, **self.matrix, num_warps=warps, num_stages=stages,
            )  # fmt: skip
        return states, final

    def grid(self) -> tuple[int, int]:
        """Of the kernels that take chunks side by side."""
        return self.chunks.most, self.groups * self.blocks

    def sizes(self) -> tuple[int, int, int, int]:
        """Integers that such a kernel takes."""
        return self.heads, self.share, self.p, self.s

    def constants(self, options: dict[str, int]) -> dict[str, Any]:
        """Constants that such a kernel takes."""
        return {
            "LENGTH": self.chunks.length,
            "HEADS": self.of_program,
            "P": padded(self.p),
            "S": padded(self.s),
            "PAIR": self.pair,
            **self.matrix,
            **options,
        }


def _forward(
    x: Tensor,
    step: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    initial: Tensor | None,
    ends: Tensor,
    limits: list[int],
) -> tuple[Tensor, Tensor]:
    y, states = _forward_fake(x, step, a_log, b, c, d, initial, ends, limits)
    if not x.numel() or not states.shape[-1]:
        return y.zero_(), states.zero_() if initial is None else states.copy_(initial)
    x, b, c = lying(x), lying(b), lying(c)
    with on_device(x):
        of = _Launch("ssd_scan", x, step, a_log, b, ends, (limits[0], limits[1]))
        before, states = of.carry(x, b, initial, back=False)
        outputs_kernel[of.grid()](
            x, b, c, x if d is None else d.contiguous(), of.step, of.total, before, y,
            *of.chunks.arguments(), *of.sizes(), *x.stride()[:2], *b.stride()[:2],
            *c.stride()[:2], SKIP=d is not None, **of.constants(of.options),
        )  # fmt: skip
    return y, states


def _forward_fake(
    x: Tensor,
    step: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    initial: Tensor | None,
    ends: Tensor,
    limits: list[int],
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), step.new_empty(ends.shape[0] - 1, *x.shape[1:], b.shape[2])


def _backward(
    dy: Tensor,
    dstates: Tensor,
    x: Tensor,
    step: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    initial: Tensor | None,
    ends: Tensor,
    limits: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, step, a_log, b, c, d and the initial states."""
    given = (x, step, a_log, b, c, d, initial)
    if not x.numel() or not b.shape[2]:
        found = _backward_fake(dy, dstates, *given, ends, limits)
        return *(one.zero_() for one in found[:6]), found[6].copy_(dstates)  # type: ignore[return-value]
    dy, x, b, c = lying(dy), lying(x), lying(b), lying(c)
    rows, heads, _ = x.shape
    with on_device(x):
        of = _Launch("ssd_scan_backward", x, step, a_log, b, ends, (limits[0], limits[1]))
        before, _ = of.carry(x, b, initial, back=False)
        behind, dinitial = of.carry(dy, c, dstates, back=True)
        dx, (dstep, written) = x.new_empty(x.shape), of.step.new_empty(2, *of.step.shape)
        grads = step.new_empty(2, of.blocks, rows, *b.shape[1:])
        sums = step.new_empty(3, of.chunks.most, heads)
        strides = (*dy.stride()[:2], *x.stride()[:2], *b.stride()[:2], *c.stride()[:2])
        input_gradients_kernel[of.grid()](
            dy, x, b, c, x if d is None else d.contiguous(), of.step, of.total, behind, dx, dstep,
            written, sums[0], *of.chunks.arguments(), *of.sizes(), *strides, SKIP=d is not None,
            **of.constants(of.options),
        )  # fmt: skip
        warps, stages = tuned("ssd_scan_state_gradients", x.device, "warps", "stages")
        for i in (0, 1):
            state_gradients_kernel[of.grid()](
                dy, x, b, c, a_log.contiguous(), of.step, of.total, before, behind, written,
                dstep, grads[i], sums[1 + i], *of.chunks.arguments(), *of.sizes(), *strides,
                OF_B=i == 0, **of.constants({"num_warps": warps, "num_stages": stages}),
            )  # fmt: skip
    db, dc = grads.sum(1)
    dd, *of_decay = sums.sum(1)
    da_log = of_decay[0] + of_decay[1]
    return (
        dx,
        dstep.t().contiguous(),
        da_log.to(a_log.dtype),
        db.to(b.dtype, copy=True),
        dc.to(c.dtype, copy=True),
        dd.to((a_log if d is None else d).dtype, copy=True),
        dinitial if initial is None else dinitial.to(initial.dtype),
    )


def _backward_fake(
    dy: Tensor,
    dstates: Tensor,
    x: Tensor,
    step: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    initial: Tensor | None,
    ends: Tensor,
    limits: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = (x, step, a_log, b, c, a_log if d is None else d, initial)
    like = (*given[:6], dstates if initial is None else initial)
    return tuple(one.new_empty(one.shape) for one in like)  # type: ignore[return-value]


_ARGUMENTS = (
    "Tensor x, Tensor step, Tensor a_log, Tensor b, Tensor c, Tensor? d, Tensor? initial, "
    "Tensor ends, int[] limits"
)
_LIBRARY = OpLibrary()
_ssd_scan = _LIBRARY.define(
    f"ssd_scan({_ARGUMENTS}) -> (Tensor, Tensor)", _forward, fake=_forward_fake
)
_ssd_scan_backward = _LIBRARY.define(
    f"ssd_scan_backward(Tensor dy, Tensor dstates, {_ARGUMENTS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    fake=_backward_fake,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.limits = inputs[8]


def _gradients(ctx: Any, dy: Tensor, dstates: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    found = _ssd_scan_backward(dy, dstates, *saved, ctx.limits)
    wanted = (one if given is not None else None for one, given in zip(found, saved, strict=False))
    return *wanted, None, None


_LIBRARY.differentiate("ssd_scan", _gradients, keep=_keep)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    uniform: tuple[int, int] | None = None,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_limits: tuple[float, float] = (0.0, math.inf),
    initial_states: Tensor | None = None,
    chunk_size: int = 256,
) -> tuple[Tensor, Tensor]:
    """See `mcore_kernels.protocols.SsdScanOp`; ValueError for shapes that do not fit.

    Of 16-bit inputs, states and what their chunks write are rounded to 16 bits where they are
    multiplied; they are carried in float32. Memory beside results: a state of 16 bits for each
    chunk (of float32 inputs, in float32). Chunks have `chunk_size` tokens at most, and fewer where
    the kernel is faster with them.
    """
    check(
        x, dt, a_log, b, c, cu_seqlens=cu_seqlens, uniform=uniform, d=d, dt_bias=dt_bias,
        dt_limits=dt_limits, initial_states=initial_states, chunk_size=chunk_size,
    )  # fmt: skip
    step = step_sizes(dt, dt_bias, dt_limits)
    longest = max_seqlen if uniform is None else uniform[1]
    ends = cu_seqlens.contiguous()
    found: tuple[Tensor, Tensor] = _ssd_scan(
        x, step, a_log, b, c, d, initial_states, ends, [chunk_size, longest]
    )
    return found
