"""Comparing the methods of operators that have more than their call."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.protocols import accumulation_dtype
from mcore_kernels.testing import spec
from mcore_kernels.testing.case import Case
from mcore_kernels.testing.compare import assert_close


def compare_linear(op: Any, arguments: dict[str, Any], wide: dict[str, Any], label: str) -> None:
    """The three products of linear, the weight gradient also into float32 and float64 buffers."""
    x, weight = arguments["x"], arguments["weight"]
    wx, ww = wide["x"], wide["weight"]
    dy = (torch.arange(x.shape[0] * weight.shape[0], device=x.device) % 13 - 6).to(x.dtype)
    dy = dy.view(x.shape[0], weight.shape[0])
    dtype = x.dtype
    assert_close(op.forward(x, weight), wx @ ww.t(), dtype=dtype, label=f"{label}: forward")
    assert_close(
        op.input_grad(dy, weight), dy.double() @ ww, dtype=dtype, slack=4.0,
        label=f"{label}: input_grad",
    )  # fmt: skip
    product = dy.double().t() @ wx
    assert_close(
        op.weight_grad(dy, x), product, dtype=dtype, slack=4.0, label=f"{label}: weight_grad"
    )
    for wanted in (torch.float32, torch.float64):
        buffer = torch.full(weight.shape, 0.5, dtype=wanted, device=x.device)
        result = op.weight_grad(dy, x, out=buffer)
        assert result is buffer, f"{label}: weight_grad returned another tensor than out"
        assert_close(
            buffer,
            product + 0.5,
            dtype=wanted,
            slack=4.0,
            label=f"{label}: weight_grad into {wanted}",
        )


def compare_rope_inplace(op: Any, arguments: dict[str, Any], label: str) -> None:
    """Turning in place gives what the operator gives, in views too, and nothing around them."""
    turned = [x.clone() for x in op(**arguments)]
    copies = {name: _same_strides(arguments[name]) for name in ("q", "k")}
    op.inplace(**{**arguments, **copies})
    for name, wanted in zip(("q", "k"), turned, strict=True):
        same = torch.equal(copies[name].nan_to_num(7.0), wanted.nan_to_num(7.0))
        assert same, f"{label}: in place: {name} differs"


def _same_strides(x: Tensor) -> Tensor:
    """A copy of x that lies in memory as x does."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x)


def compare_attention_backward(
    op: Any, arguments: dict[str, Any], wide: dict[str, Any], case: Case, label: str
) -> None:
    """The backward called alone, with an output merged from this block of keys and another.

    Ring attention sees the keys block by block: out and lse are of all blocks, and this block's
    gradients are its share. The other block is played by one more key that every query sees.
    """
    tensors = [wide[name].requires_grad_() for name in ("q", "k", "v")]
    rest = {name: value for name, value in wide.items() if name not in ("q", "k", "v")}
    out, lse = spec.attention(*tensors, **rest)
    other_lse = torch.full_like(lse, 0.25)
    other_out = torch.full_like(out, -0.5).detach()
    merged_lse = torch.logaddexp(lse, other_lse)
    share = (lse - merged_lse).exp().unsqueeze(-1)
    merged = (out * share + other_out * (1 - share)).detach()
    grad_out = ((torch.arange(out.numel(), device=out.device) % 11 - 5) / 4).view(out.shape)

    # d merged / d score of this block, written out: the share weighs out and its own gradient.
    p_share = (grad_out * share).detach()
    lean = (grad_out * (out - merged)).sum(-1).detach()
    dq, dk, dv = _share_of_gradients(tensors, rest, p_share, share.squeeze(-1) * lean)
    dtype = arguments["q"].dtype
    results = op.backward(
        grad_out.to(dtype),
        *(arguments[name] for name in ("q", "k", "v")),
        out=merged.to(dtype),
        lse=merged_lse.to(accumulation_dtype(dtype)),
        **{name: value for name, value in arguments.items() if name not in ("q", "k", "v")},
    )
    for name, value, expected in zip(("dq", "dk", "dv"), results, (dq, dk, dv), strict=True):
        # Rounding the merged output to the dtype costs digits where gradients cancel.
        assert_close(
            value, expected, dtype=dtype, slack=8.0 * case.slack, floor=case.floor,
            label=f"{label}: backward: {name}",
        )  # fmt: skip


def _share_of_gradients(
    tensors: list[Tensor], rest: dict[str, Any], grad_out: Tensor, grad_lse: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of Σ out · grad_out + Σ lse · grad_lse by autograd, lse taken from the scores."""
    out, lse = spec.attention(*tensors, differentiable_lse=True, **rest)
    total = (out * grad_out).sum()
    seen = lse.isfinite()
    total = total + (torch.where(seen, lse, 0.0) * torch.where(seen, grad_lse, 0.0)).sum()
    grads = torch.autograd.grad(total, tensors, allow_unused=True)
    return tuple(
        torch.zeros_like(x) if grad is None else grad
        for x, grad in zip(tensors, grads, strict=True)
    )


def compare_vocab_loss(
    op: Any, arguments: dict[str, Any], wide: dict[str, Any], label: str
) -> None:
    """The loss over shards of the vocabulary, reduced as ranks would, and its gradient."""
    logits, labels = arguments["logits"], arguments["labels"]
    on_target, on_all = arguments["on_target"], arguments["on_all"]
    bounds = [0, *arguments["cuts"], logits.shape[1]]
    shards = [logits[:, a:b] for a, b in pairwise(bounds)]
    local = [labels - a for a in bounds[:-1]]
    maximum = torch.stack([op.local_max(shard) for shard in shards]).amax(0)
    sums = sum(
        op.partials(shard, label_, maximum, smoothing=on_all > 0)
        for shard, label_ in zip(shards, local, strict=True)
    )
    loss = sums[0].log() - on_target * sums[1] - on_all * sums[2]
    z = wide["logits"].requires_grad_()
    expected = spec.cross_entropy(z, labels, on_target=on_target, on_all=on_all)
    wide_dtype = accumulation_dtype(logits.dtype)
    assert_close(loss, expected.detach(), dtype=wide_dtype, slack=4.0, label=f"{label}: loss")
    weight = torch.arange(1, labels.numel() + 1, device=labels.device).to(wide_dtype) / 8
    (gradient,) = torch.autograd.grad(expected, z, weight.double())
    for out in (torch.full_like(logits, torch.nan), logits.clone()):
        # A gradient tensor of its own, and one that takes the place of the logits.
        source = out if torch.equal(out, logits) else logits
        for a, b, label_ in zip(bounds[:-1], bounds[1:], local, strict=True):
            op.backward(
                source[:, a:b], label_, maximum, sums[0], weight,
                on_target=on_target, on_all=on_all, out=out[:, a:b],
            )  # fmt: skip
        assert_close(out, gradient, dtype=logits.dtype, slack=4.0, label=f"{label}: gradient")
    _compare_coefficients(op, shards, local, maximum, sums[0], label)


def _compare_coefficients(  # noqa: PLR0917 -- one internal caller
    op: Any,
    shards: list[Tensor],
    local: list[Tensor],
    maximum: Tensor,
    sum_exp: Tensor,
    label: str,
) -> None:
    """The moments, and the gradient with a coefficient of each token on each of its terms."""
    wide_max, wide_sum = maximum.double(), sum_exp.double()
    step = torch.arange(maximum.numel(), device=maximum.device).to(maximum.dtype) / 4
    given = {"softmax": step + 1, "surprise": step - 0.5, "target": 2 - step, "all": step / 8}
    for shard, label_ in zip(shards, local, strict=True):
        x = shard.double() - wide_max.unsqueeze(1)
        seen = torch.where(x == -torch.inf, 0.0, x)
        moments = (x.exp() * seen).sum(-1)
        assert_close(
            op.moments(shard, maximum), moments, dtype=maximum.dtype, slack=4.0, floor=1.0,
            label=f"{label}: moments",
        )  # fmt: skip
        a, b, c, d = (one.double().unsqueeze(1) for one in given.values())
        at_label = torch.arange(shard.shape[1], device=x.device) == label_.unsqueeze(1)
        expected = x.exp() / wide_sum.unsqueeze(1) * (a + b * seen) - c * at_label - d
        out = torch.full_like(shard, torch.nan)
        op.gradient(
            shard, label_, maximum, sum_exp, out=out,
            **{f"on_{name}": value for name, value in given.items()},
        )  # fmt: skip
        assert_close(
            out, expected, dtype=shard.dtype, slack=4.0, floor=1.0,
            label=f"{label}: gradient of all terms",
        )  # fmt: skip
