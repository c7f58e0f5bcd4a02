"""Every operator once more, written as its formula: slow, obvious, and independent of `ops`.

They are run in float64, with gradients by torch's autograd, and are what implementations (the
references too) are compared with. Shapes as in `mcore_kernels.protocols`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b."""
    y = torch.einsum("ti,oi->to", x, weight)
    return y if bias is None else y + bias


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, zero_centered: bool = False
) -> Tensor:
    """x / sqrt(mean(x²) + eps) · w."""
    normed = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * (weight + zero_centered)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """The sum, and its RMS norm."""
    total = x + residual
    return rms_norm(total, weight, eps, zero_centered=zero_centered), total


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered: bool = False
) -> Tensor:
    """(x - mean) / sqrt(var + eps) · w + b."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y * (weight + zero_centered)
    return y if bias is None else y + bias


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(Σ x² + eps)."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """gate · σ(gate) · up."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half], gate_up[..., half:]
    return gate * torch.sigmoid(gate) * up


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x Φ(x), or the tanh formula."""
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * torch.erfc(-x / math.sqrt(2))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, "tanh"),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: (x + x.abs()) / 2,
    "squared_relu": lambda x: (x * x + x * x.abs()) / 2,
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
}


def glu(
    gate_up: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "silu",
    limit: float | None = None,
    offset: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """f(min(gate, L)) · (clamp(up, -L, L) + offset) · weight of the row."""
    x = gate_up if bias is None else gate_up + bias
    half = x.shape[-1] // 2
    gate, up = x[..., :half], x[..., half:]
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    y = swiglu(x) if (activation, limit, offset) == ("silu", None, 0.0) else None
    y = _ACTIVATIONS[activation](gate) * (up + offset) if y is None else y
    return y if weights is None else y * weights[..., None]


def activation(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "gelu",
    weights: Tensor | None = None,
) -> Tensor:
    """f(x + bias) · weight of the row."""
    y = _ACTIVATIONS[activation](x if bias is None else x + bias)
    return y if weights is None else y * weights[..., None]


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Pairs as complex numbers, times exp(i · angle)."""
    half = cos.shape[-1]
    turn = torch.complex(cos, sin).unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        if interleaved:
            first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        else:
            first, second = x[..., :half], x[..., half : 2 * half]
        z = torch.complex(first, second) * turn
        pairs = (z.real, z.imag)
        head = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
        return torch.cat((head, x[..., 2 * half :]), -1)

    return turned(q), turned(k)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    differentiable_lse: bool = False,
    **hints: object,
) -> tuple[Tensor, Tensor]:
    """Query by query: softmax over the visible keys; `hints` (lengths, uniform) are not needed."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = [q.new_zeros(q.shape[1], v.shape[2]) for _ in range(q.shape[0])]
    nowhere = q.new_full((q.shape[1],), -torch.inf) if sinks is None else sinks
    lse = [nowhere for _ in range(q.shape[0])]
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for n in range(len(ends_q) - 1):
        lq, lk = ends_q[n + 1] - ends_q[n], ends_k[n + 1] - ends_k[n]
        for i in range(lq):
            p = i + lk - lq
            after = lk if not causal else p + 1
            before = 0
            if window is not None:
                after, before = min(after, p + window), max(0, p - window + 1)
            seen = slice(ends_k[n] + before, ends_k[n] + max(before, min(after, lk)))
            if seen.start < seen.stop:
                row = ends_q[n] + i
                scores = torch.einsum("qd,lqd->lq", q[row], k[seen]) * scale
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                every = scores if sinks is None else torch.cat((scores, sinks.unsqueeze(0)))
                shares = every.softmax(0)[: len(scores)]
                out[row] = torch.einsum("lq,lqd->qd", shares, v[seen])
                lse[row] = every.logsumexp(0)
    if not out:
        nothing = q.sum(-1)
        return nothing.unsqueeze(-1).expand(0, q.shape[1], v.shape[2]), nothing.detach()
    all_lse = torch.stack(lse)
    return torch.stack(out), all_lse if differentiable_lse else all_lse.detach()


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    block_table: Tensor,
    context_lengths: Tensor,
    cu_seqlens_q: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Key by key out of the pages, then as attention."""
    page = key_cache.shape[1]
    found = []
    for cache, factor in ((key_cache, key_scale), (value_cache, value_scale)):
        rows = [
            cache[block_table[n, j // page], j % page]
            for n, length in enumerate(context_lengths.tolist())
            for j in range(length)
        ]
        together = torch.stack(rows) if rows else cache.new_zeros(0, *cache.shape[2:])
        found.append(together if factor is None else together * factor[:, None])
    ends = torch.cat((context_lengths.new_zeros(1), context_lengths.cumsum(0)))
    return attention(q, *found, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=ends, **options)


def cross_entropy(logits: Tensor, labels: Tensor, *, on_target: float, on_all: float) -> Tensor:
    """-Σ_j weight_j · log softmax_j, over the whole vocabulary: per-token loss [T]."""
    logits = logits - logits.detach().amax(-1, keepdim=True)  # keeps digits, changes nothing
    log_p = logits - logits.logsumexp(-1, keepdim=True)
    loss = -on_target * log_p.gather(1, labels.unsqueeze(1)).squeeze(1)
    return loss - on_all * log_p.sum(-1) if on_all else loss  # 0 · inf is NaN


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
    """Row by row, with the weight of the row's expert."""
    numbers = counts.tolist() if isinstance(counts, Tensor) else counts
    expert = [i for i, count in enumerate(numbers) for _ in range(count)]
    return torch.einsum("ri,roi->ro", x, weight[expert])


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor,
    initial_states: Tensor | None = None,
    silu: bool = False,
    **hints: object,
) -> tuple[Tensor, Tensor]:
    """Row by row: the sum over the taps, of the history and the document in one list."""
    channels, width = weight.shape
    out = [x[row] * 0 for row in range(x.shape[0])]
    states = []
    for n, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        if initial_states is None:
            history = [x.new_zeros(channels)] * (width - 1)
        else:
            history = list(initial_states[n])
        rows = history + [x[row] for row in range(start, stop)]
        for t in range(stop - start):
            y = sum((rows[t + k] * weight[:, k] for k in range(width)), x.new_zeros(channels))
            y = y if bias is None else y + bias
            out[start + t] = y * torch.sigmoid(y) if silu else y
        last = rows[len(rows) - width + 1 :]
        states.append(torch.stack(last) if last else x.new_zeros(0, channels))
    nothing = x.new_zeros(0, width - 1, channels)
    return torch.stack(out) if out else x, torch.stack(states) if states else nothing


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    cu_seqlens: Tensor,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_limits: tuple[float, float] = (0.0, math.inf),
    initial_states: Tensor | None = None,
    **hints: object,
) -> tuple[Tensor, Tensor]:
    """Document by document, token by token: the recurrence of the paper."""
    heads, size = x.shape[1:]
    of_head = [head // (heads // b.shape[1]) for head in range(heads)]
    step = torch.logaddexp(dt if dt_bias is None else dt + dt_bias, dt.new_zeros(()))
    step = step.clamp(*dt_limits)
    out = [x[row] * 0 for row in range(x.shape[0])]
    states = []
    for n, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        state = x.new_zeros(heads, size, b.shape[2])
        if initial_states is not None:
            state = initial_states[n]
        for t in range(start, stop):
            kept = torch.exp(-torch.exp(a_log) * step[t])
            new = torch.einsum("h,hp,hs->hps", step[t], x[t], b[t][of_head])
            state = kept[:, None, None] * state + new
            out[t] = torch.einsum("hps,hs->hp", state, c[t][of_head])
            if d is not None:
                out[t] = out[t] + d[:, None] * x[t]
        states.append(state)
    nothing = x.new_zeros(0, heads, size, b.shape[2])
    return torch.stack(out) if out else x, torch.stack(states) if states else nothing


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor,
    scale: float | None = None,
    initial_states: Tensor | None = None,
    **hints: object,
) -> tuple[Tensor, Tensor]:
    """Document by document, token by token: the recurrence of the paper."""
    (heads, size), key_size = v.shape[1:], q.shape[2]
    of_head = [head // (heads // q.shape[1]) for head in range(heads)]
    scale = 1 / math.sqrt(key_size) if scale is None else scale
    out = [v[row] * 0 for row in range(v.shape[0])]
    states = []
    for n, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        state = v.new_zeros(heads, key_size, size)
        if initial_states is not None:
            state = initial_states[n]
        for t in range(start, stop):
            key, query = k[t][of_head], q[t][of_head]
            state = torch.exp(g[t])[:, None, None] * state
            wrong = v[t] - torch.einsum("hd,hdv->hv", key, state)
            state = state + torch.einsum("hd,h,hv->hdv", key, beta[t], wrong)
            out[t] = scale * torch.einsum("hd,hdv->hv", query, state)
        states.append(state)
    nothing = v.new_zeros(0, heads, key_size, size)
    return torch.stack(out) if out else v, torch.stack(states) if states else nothing
