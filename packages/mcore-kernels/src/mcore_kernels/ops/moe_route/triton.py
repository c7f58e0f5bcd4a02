"""The router in Triton. Imported only when it is chosen, because it imports triton.

One kernel each way. A program takes BLOCK tokens with all their experts, and finds the best one k
times over: scores are mapped to integers that are ordered as they are, with the expert's number in
the bits below, so that one maximum says both and equal scores go to the lowest number. The backward
keeps the logits and the choice.

Shapes: T tokens, E experts in G groups, k chosen; tiles are [BLOCK, GROUPS, SIZE], filled up.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take pointers and strides by position

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary, on_device, rows
from mcore_kernels.ops.moe_route.rule import RoutingRule
from mcore_kernels.tuning import tuned

_SCORES = ("softmax", "sigmoid", "sqrt_softplus")
_TAKEN = tl.constexpr(-(2**63))


@triton.jit
def _ordered(values, place, known):
    """int64 ordered as (value, -place); NaN is the largest, and what is not known the least."""
    values = tl.where(values == 0.0, 0.0, values)  # there are two zeros
    bits = values.to(tl.float32).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    bits = tl.where(values != values, 0x7FFFFFFF, bits)  # noqa: PLR0124 -- NaN
    return tl.where(known, bits.to(tl.int64) * 4294967296 + (65535 - place), _TAKEN)


@triton.jit
def _value(ordered):
    """The value that was mapped."""
    bits = (ordered >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _over(x):
    """The sum over a token's experts: [BLOCK, 1, 1]."""
    return tl.sum(tl.sum(x, axis=2), axis=1)[:, None, None]


@triton.jit
def _largest(x):
    return tl.max(tl.max(x, axis=2), axis=1)[:, None, None]


@triton.jit
def _softplus(z):
    # log1p: the quotient takes back what the sum lost of a small exponential.
    small = tl.exp(-tl.abs(z))
    near = 1.0 + small
    log = tl.where(near == 1.0, small, tl.log(near) * (small / (near - 1.0)))
    return tl.maximum(z, 0.0) + log


@triton.jit
def _scores(z, known, SCORE: tl.constexpr):
    if SCORE == 0:
        found = tl.exp(z - _largest(tl.where(known, z, float("-inf"))))
        found = tl.where(known, found, 0.0)
        found = found / _over(found)
    elif SCORE == 1:
        found = tl.sigmoid(z)
    else:
        found = tl.sqrt(_softplus(z))
    return tl.where(known, found, 0.0)


@triton.jit
def _of_chosen(z, chosen):
    """The softmax over the chosen experts alone."""
    found = tl.exp(z - _largest(tl.where(chosen, z, float("-inf"))))
    found = tl.where(chosen, found, 0.0)
    return found / _over(found)


@triton.jit
def _forward_kernel(
    z_ptr,
    correction_ptr,
    weights_ptr,
    experts_ptr,
    scores_ptr,
    t,
    groups,
    size,
    stride,
    k,
    best_of_group,
    top_groups,
    scale,
    SCORE: tl.constexpr,
    NORMALISE: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None, None]
    group, of_group = tl.arange(0, GROUPS)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    expert = group * size + of_group
    able = (group < groups) & (of_group < size)
    known = able & (row < t)
    z = tl.load(z_ptr + row * stride + expert, mask=known, other=0.0).to(tl.float32)
    scores = _scores(z, able, SCORE)
    tl.store(scores_ptr + row * (groups * size) + expert, scores, mask=known)
    # Scores rise with the logits, but may round to equal ones.
    values = z
    if CORRECTED or GROUPED:
        values = scores
    if CORRECTED:
        values += tl.load(correction_ptr + expert, mask=able, other=0.0).to(tl.float32)
    ordered = _ordered(values, expert, able)
    if GROUPED:
        quality = tl.zeros((BLOCK, GROUPS), dtype=tl.float32)
        left = ordered
        for _ in range(best_of_group):
            best = tl.max(left, axis=2)
            quality += _value(best)
            left = tl.where(left == best[:, :, None], _TAKEN, left)
        number = tl.arange(0, GROUPS)[None, :]
        left_groups = _ordered(quality, number, number < groups)
        open_groups = tl.zeros((BLOCK, GROUPS), dtype=tl.int32)
        for _ in range(top_groups):
            hit = left_groups == tl.max(left_groups, axis=1)[:, None]
            open_groups = tl.where(hit, 1, open_groups)
            left_groups = tl.where(hit, _TAKEN, left_groups)
        closed = able & (open_groups == 0)[:, :, None]
        ordered = _ordered(tl.where(closed, float("-inf"), values), expert, able)
    rank = tl.full((BLOCK, GROUPS, SIZE), -1, dtype=tl.int32)
    for j in range(k):
        hit = ordered == _largest(ordered)
        rank = tl.where(hit, j, rank)
        ordered = tl.where(hit, _TAKEN, ordered)
    chosen = rank >= 0
    weights = scores
    if NORMALISE and SCORE == 0:
        # The quotients without the scores, which may all have rounded to 0.
        weights = _of_chosen(z, chosen)
    elif NORMALISE:
        weights = scores / (_over(tl.where(chosen, scores, 0.0)) + 1e-20)
    to = row * k + rank
    tl.store(weights_ptr + to, weights * scale, mask=known & chosen)
    tl.store(experts_ptr + to, expert.to(tl.int64) + 0 * to, mask=known & chosen)


@triton.jit
def _backward_kernel(
    z_ptr,
    experts_ptr,
    dweights_ptr,
    dscores_ptr,
    dz_ptr,
    t,
    size,
    stride,
    k,
    scale,
    SCORE: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None, None]
    expert = tl.arange(0, SIZE)[None, None, :]
    able = expert < size
    known = able & (row < t)
    z = tl.load(z_ptr + row * stride + expert, mask=known, other=0.0).to(tl.float32)
    scores = _scores(z, able, SCORE)
    dweights = tl.zeros((BLOCK, 1, SIZE), dtype=tl.float32)
    rank = tl.full((BLOCK, 1, SIZE), -1, dtype=tl.int32)
    for j in range(k):
        hit = expert == tl.load(experts_ptr + row * k + j, mask=row < t, other=-1)
        dweights = tl.where(
            hit, tl.load(dweights_ptr + row * k + j, mask=row < t, other=0.0), dweights
        )
        rank = tl.where(hit, j, rank)
    chosen = rank >= 0
    dweights = dweights * scale
    dscores = tl.load(dscores_ptr + row * size + expert, mask=known, other=0.0)
    dz = tl.zeros((BLOCK, 1, SIZE), dtype=tl.float32)
    if NORMALISE and SCORE == 0:
        shares = _of_chosen(z, chosen)
        dz += shares * (dweights - _over(dweights * shares))
    elif NORMALISE:
        total = _over(tl.where(chosen, scores, 0.0)) + 1e-20
        both = _over(dweights * scores) / total
        dscores += tl.where(chosen, (dweights - both) / total, 0.0)
    else:
        dscores += dweights
    if SCORE == 0:
        dz += scores * (dscores - _over(dscores * scores))
    elif SCORE == 1:
        dz += dscores * scores * (1.0 - scores)
    else:
        # Far below 0 the score rounds to 0, where the root has no slope; that of the score is 0.
        vanished = scores == 0.0
        slope = tl.sigmoid(z) / (2.0 * tl.where(vanished, 1.0, scores))
        dz += tl.where(able & ~vanished, dscores * slope, 0.0)
    tl.store(dz_ptr + row * size + expert, dz.to(dz_ptr.dtype.element_ty), mask=known)


def _tile(x: Tensor, experts: int) -> tuple[int, int]:
    """Tokens and warps of a program."""
    elements, warps = tuned("moe_route", x.device, "elements", "warps")
    return max(1, elements // experts), warps


def _forward(
    logits: Tensor, correction: Tensor | None, top_k: int, score: int, normalise: bool,
    scale: float, groups: int, top_groups: int, best_of_group: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    weights, experts, scores = _forward_fake(
        logits, correction, top_k, score, normalise, scale, groups, top_groups, best_of_group
    )
    if logits.numel():
        flat = rows(logits)
        size = flat.shape[1] // groups
        tile = triton.next_power_of_2(groups), triton.next_power_of_2(size)
        block, warps = _tile(flat, tile[0] * tile[1])
        with on_device(flat):
            _forward_kernel[(triton.cdiv(flat.shape[0], block),)](
                flat, flat if correction is None else correction.contiguous(), weights, experts,
                scores, flat.shape[0], groups, size, flat.stride(0), top_k, best_of_group,
                top_groups, scale, SCORE=score, NORMALISE=normalise,
                CORRECTED=correction is not None, GROUPED=groups > 1, BLOCK=block, GROUPS=tile[0],
                SIZE=tile[1], num_warps=warps,
            )  # fmt: skip
    return weights, experts, scores


def _forward_fake(
    logits: Tensor, correction: Tensor | None, top_k: int, score: int, normalise: bool,
    scale: float, groups: int, top_groups: int, best_of_group: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    chosen = (*logits.shape[:-1], top_k)
    return (
        logits.new_empty(chosen, dtype=torch.float32),
        logits.new_empty(chosen, dtype=torch.int64),
        logits.new_empty(logits.shape, dtype=torch.float32),
    )


def _backward(
    dweights: Tensor, dscores: Tensor, logits: Tensor, experts: Tensor, score: int,
    normalise: bool, scale: float,
) -> Tensor:  # fmt: skip
    dlogits = logits.new_empty(logits.shape)
    if logits.numel():
        flat = rows(logits)
        block, warps = _tile(flat, triton.next_power_of_2(flat.shape[1]))
        with on_device(flat):
            _backward_kernel[(triton.cdiv(flat.shape[0], block),)](
                flat, experts.contiguous(), dweights.contiguous(), dscores.contiguous(), dlogits,
                *flat.shape, flat.stride(0), experts.shape[-1], scale, SCORE=score,
                NORMALISE=normalise, BLOCK=block, SIZE=triton.next_power_of_2(flat.shape[1]),
                num_warps=warps,
            )  # fmt: skip
    return dlogits


def _backward_fake(
    dweights: Tensor, dscores: Tensor, logits: Tensor, experts: Tensor, score: int,
    normalise: bool, scale: float,
) -> Tensor:  # fmt: skip
    return logits.new_empty(logits.shape)


_LIBRARY = OpLibrary()
_route = _LIBRARY.define(
    "moe_route(Tensor logits, Tensor? correction, int top_k, int score, bool normalise, "
    "float scale, int groups, int top_groups, int best_of_group) -> (Tensor, Tensor, Tensor)",
    _forward,
    fake=_forward_fake,
)
_route_backward = _LIBRARY.define(
    "moe_route_backward(Tensor dweights, Tensor dscores, Tensor logits, Tensor experts, "
    "int score, bool normalise, float scale) -> Tensor",
    _backward,
    fake=_backward_fake,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.rule = inputs[3:6]


def _gradients(ctx: Any, dweights: Tensor, _: Any, dscores: Tensor) -> tuple[Tensor | None, ...]:
    logits, experts = ctx.saved_tensors
    dlogits = _route_backward(dweights, dscores, logits, experts, *ctx.rule)
    return dlogits, *[None] * 8


_LIBRARY.differentiate("moe_route", _gradients, keep=_keep)


def moe_route(
    logits: Tensor, correction: Tensor | None = None, *, rule: RoutingRule
) -> tuple[Tensor, Tensor, Tensor]:
    """See `mcore_kernels.protocols.MoeRouteOp`; ValueError where the rule does not fit E."""
    rule.check(logits.shape[-1])
    found: tuple[Tensor, Tensor, Tensor] = _route(
        logits, None if correction is None else correction.detach(), rule.top_k,
        _SCORES.index(rule.score), rule.normalise, rule.scale, rule.num_groups, rule.top_groups,
        rule.best_of_group,
    )  # fmt: skip
    return found
