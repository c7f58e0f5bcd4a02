"""What is measured of each operator: calls on sizes of real models, and their least cost.

Shapes: T tokens, H hidden, F feed-forward, V vocabulary, E experts, 128 the head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.ops.moe_permute.assignment import Assignment
from mcore_kernels.ops.moe_route.rule import RoutingRule
from mcore_kernels.ops.rope.angles import rope_cos_sin
from mcore_kernels.quant.formats import E4M3

_HEAD = 128
_EXPERTS, _TOP_K = 8, 2


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """tokens T, hidden H (a multiple of 128, the head size); F is 4 H, V is 8 H."""

    tokens: int
    hidden: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}")
        if self.hidden < _HEAD or self.hidden % _HEAD:
            near = max(round(self.hidden / _HEAD), 1) * _HEAD
            raise ValueError(f"hidden must be a multiple of 128, got {self.hidden}; {near} is")

    @staticmethod
    def of(device: torch.device) -> Sizes:
        """What does not fit the caches of the device, yet takes a moment only."""
        if device.type == "cuda":
            return Sizes(tokens=16_384, hidden=4096)
        return Sizes(tokens=2048, hidden=1024)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One measured call.

    Attributes:
        name: "forward", "backward" or what it is.
        run: makes the call.
        num_bytes: what has to be read and written at least.
        flops: operations of its matrix products.
    """

    name: str
    run: Callable[[], object]
    num_bytes: float = 0.0
    flops: float = 0.0


Make = Callable[..., Tensor]


def drawn(device: torch.device, dtype: torch.dtype) -> Make:
    """A maker of tensors of random numbers, by their shapes."""
    generator = torch.Generator(device).manual_seed(0)

    def make(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        numbers = torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)
        return numbers.to(kind)

    return make


def works(op: str, call: Any, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> list[Work]:
    """The measured calls of an operator, on numbers drawn at random."""
    return list(_WORKS[op](call, sizes, drawn(device, dtype)))


def _both(
    call: Callable[..., Any],
    inputs: list[Tensor],
    *,
    forward: tuple[float, float],
    backward: tuple[float, float],
) -> Iterator[Work]:
    """The forward, and the backward of a graph that is kept; pairs are (bytes, flops)."""
    yield Work(name="forward", run=lambda: call(*inputs), num_bytes=forward[0], flops=forward[1])
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = call(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    outputs = [y for y in results if y.requires_grad]
    grads = [torch.ones_like(y) for y in outputs]
    yield Work(
        name="backward",
        run=lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True),
        num_bytes=backward[0],
        flops=backward[1],
    )


def _linear(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    x, weight = make(of.tokens, of.hidden), make(4 * of.hidden, of.hidden)
    flops = 2.0 * of.tokens * of.hidden * 4 * of.hidden
    yield Work(name="forward", run=lambda: call.forward(x, weight), flops=flops)
    dy = make(of.tokens, 4 * of.hidden)
    yield Work(name="input gradient", run=lambda: call.input_grad(dy, weight), flops=flops)
    buffer = make(4 * of.hidden, of.hidden, kind=torch.float32)
    yield Work(
        name="weight gradient into float32",
        run=lambda: call.weight_grad(dy, x, out=buffer),
        flops=flops,
    )


def _norm(call: Any, of: Sizes, make: Make, *vectors: int) -> Iterator[Work]:
    x = make(of.tokens, of.hidden)
    size = float(x.numel() * x.itemsize)
    inputs = [x, *(make(of.hidden) for _ in vectors)]
    yield from _both(
        lambda *given: call(*given, 1e-5), inputs, forward=(2 * size, 0), backward=(3 * size, 0)
    )


def _rms_norm(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    yield from _norm(call, of, make, 1)


def _layer_norm(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    yield from _norm(call, of, make, 1, 2)


def _l2_norm(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    yield from _norm(call, of, make)


def _add_rms_norm(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    x, residual, weight = make(of.tokens, of.hidden), make(of.tokens, of.hidden), make(of.hidden)
    size = float(x.numel() * x.itemsize)
    yield from _both(
        lambda *given: call(*given, 1e-5), [x, residual, weight],
        forward=(4 * size, 0), backward=(4 * size, 0),
    )  # fmt: skip


def _gated(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    x = make(of.tokens, 4 * of.hidden)
    size = float(x.numel() * x.itemsize)
    yield from _both(call, [x], forward=(1.5 * size, 0), backward=(2.5 * size, 0))


def _plain(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    x = make(of.tokens, 4 * of.hidden)
    size = float(x.numel() * x.itemsize)
    yield from _both(call, [x], forward=(2 * size, 0), backward=(3 * size, 0))


def _rope(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    heads = of.hidden // _HEAD
    q, k = make(of.tokens, heads, _HEAD), make(of.tokens, max(heads // 4, 1), _HEAD)
    angles = rope_cos_sin(torch.arange(of.tokens, device=q.device), _HEAD)
    size = 2.0 * (q.numel() + k.numel()) * q.itemsize
    size += sum(x.numel() * x.itemsize for x in angles)
    yield from _both(
        lambda a, b: call(a, b, *angles), [q, k], forward=(size, 0), backward=(size, 0)
    )


def _attention(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    heads, length = of.hidden // _HEAD, of.tokens
    q = make(length, heads, _HEAD)
    k, v = (make(length, max(heads // 4, 1), _HEAD) for _ in range(2))
    ends = torch.tensor([0, length], dtype=torch.int32, device=q.device)
    options = {
        "cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": length,
        "max_seqlen_k": length, "uniform": (1, length),
    }  # fmt: skip
    # Two products over the lower triangle; five in the backward.
    flops = 2.0 * length**2 * heads * _HEAD
    yield from _both(
        lambda *given: call(*given, **options), [q, k, v],
        forward=(0, flops), backward=(0, 2.5 * flops),
    )  # fmt: skip


def _cross_entropy(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    rows = max(of.tokens // 4, 1)
    logits = make(rows, 8 * of.hidden)
    labels = torch.arange(rows, device=logits.device) % (8 * of.hidden)
    maximum = call.local_max(logits)
    sums = call.partials(logits, labels, maximum, smoothing=False)
    size, out = float(logits.numel() * logits.itemsize), torch.empty_like(logits)

    def backward() -> None:
        call.backward(logits, labels, maximum, sums[0], maximum, on_target=1.0, on_all=0.0, out=out)

    yield Work(
        name="sums", run=lambda: call.partials(logits, labels, maximum, smoothing=False),
        num_bytes=size,
    )  # fmt: skip
    yield Work(name="backward", run=backward, num_bytes=2 * size)


def _moe_permute(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    x = make(of.tokens, of.hidden)
    experts = make(of.tokens, _EXPERTS, kind=torch.float32).argsort(-1)[:, :_TOP_K]
    assignment = Assignment.of(experts, _EXPERTS)
    size = float(x.numel() * x.itemsize) * (1 + _TOP_K)
    rows, weights = call.permute(x, assignment), make(of.tokens, _TOP_K)
    yield Work(name="there", run=lambda: call.permute(x, assignment), num_bytes=size)
    yield Work(
        name="and back", run=lambda: call.unpermute(rows, weights, assignment), num_bytes=size
    )


def _grouped_linear(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    rows, wide = of.tokens * _TOP_K, of.hidden
    x, weight = make(rows, of.hidden), make(_EXPERTS, wide, of.hidden)
    counts = torch.full((_EXPERTS,), rows // _EXPERTS, device=x.device)
    counts[0] += rows - int(counts.sum())
    dy, buffer = make(rows, wide), make(_EXPERTS, wide, of.hidden, kind=torch.float32)
    flops = 2.0 * rows * of.hidden * wide
    for name, run in (
        ("forward", lambda: call.forward(x, weight, counts)),
        ("input gradient", lambda: call.input_grad(dy, weight, counts)),
        ("weight gradient into float32", lambda: call.weight_grad(dy, x, counts, buffer)),
    ):
        yield Work(name=name, run=run, flops=flops)


def _paged_attention(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    sequences, page, heads = 64, 64, of.hidden // _HEAD
    pages, kv = max(of.tokens // (4 * page), 1), max(heads // 4, 1)
    caches = [make(sequences * pages, page, kv, _HEAD) for _ in range(2)]
    q = make(sequences, heads, _HEAD)
    device = q.device
    options = {
        "block_table": torch.arange(sequences * pages, device=device, dtype=torch.int32).view(
            sequences, pages
        ),
        "context_lengths": torch.full((sequences,), pages * page, dtype=torch.int32, device=device),
        "cu_seqlens_q": torch.arange(sequences + 1, dtype=torch.int32, device=device),
        "max_seqlen_q": 1,
    }
    size = sum(x.numel() * x.itemsize for x in caches)
    yield Work(name="decoding", run=lambda: call(q, *caches, **options), num_bytes=size)


def _quantize(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    x = make(of.tokens, of.hidden)
    size = float(x.numel() * x.itemsize)
    yield Work(
        name="tensor, both ways", run=lambda: call.both(x, E4M3),
        num_bytes=2 * size + 2 * x.numel(),
    )  # fmt: skip
    yield Work(
        name="pieces of 128, both ways", run=lambda: call.both(x, E4M3, (1, 128)),
        num_bytes=size + 2 * x.numel(),
    )  # fmt: skip


def _fp8_matmul(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    from mcore_kernels.ops.quantize.reference import QUANTIZE

    a, b = make(of.tokens, of.hidden), make(4 * of.hidden, of.hidden)
    flops = 2.0 * of.tokens * of.hidden * 4 * of.hidden
    for name, blocks in (("tensors", ((0, 0), (0, 0))), ("blocks", ((1, 128), (128, 128)))):
        factors = [*QUANTIZE(a, E4M3, blocks[0]), *QUANTIZE(b, E4M3, blocks[1])]
        options = {"a_block": blocks[0], "b_block": blocks[1], "dtype": a.dtype, "fast": True}
        run = partial(call, *factors, **options)
        yield Work(name=f"scales of {name}", run=run, flops=flops)


def _adam(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    n = of.tokens * of.hidden
    value, grad, mean, square = (make(n, kind=torch.float32) for _ in range(4))
    square.square_()
    copy = value.to(torch.bfloat16)
    options: dict[str, Any] = {
        "lr": 1e-6, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 10,
    }  # fmt: skip
    yield Work(
        name="step with a bfloat16 copy",
        run=lambda: call(value, grad, mean, square, copy=copy, **options),
        num_bytes=30.0 * n,
    )


def _grad_stats(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    x = make(of.tokens * of.hidden, kind=torch.float32)
    yield Work(name="norm and health", run=lambda: call([x]), num_bytes=4.0 * x.numel())


def _moe_route(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    logits, rule = make(of.tokens, 128, kind=torch.float32), RoutingRule(top_k=8, normalise=True)
    size = 2.0 * logits.numel() * 4
    yield from _both(
        lambda given: call(given, rule=rule), [logits], forward=(size, 0), backward=(1.5 * size, 0)
    )


def _causal_conv1d(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    x, weight = make(of.tokens, of.hidden), make(of.hidden, 4)
    ends = torch.tensor([0, of.tokens], dtype=torch.int32, device=x.device)
    size = float(x.numel() * x.itemsize)
    yield from _both(
        lambda *given: call(*given, cu_seqlens=ends, silu=True)[0], [x, weight],
        forward=(2 * size, 0), backward=(3 * size, 0),
    )  # fmt: skip


def _ssd_scan(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    # As Mamba-2: heads of 64 with states of 128, one group; a document long enough for many chunks.
    rows, heads, state = max(of.tokens // 2, 1), of.hidden // 64, 128
    x, dt = make(rows, heads, 64), make(rows, heads)
    b, c = (make(rows, 1, state).div_(state**0.5) for _ in range(2))
    a_log = make(heads, kind=torch.float32)
    ends = torch.tensor([0, rows], dtype=torch.int32, device=x.device)
    size = float(x.itemsize * (x.numel() + dt.numel() + b.numel() + c.numel()))
    out = float(x.numel() * x.itemsize)
    # Scores of a group, shares and states of each head, in chunks of 64; and their transposes.
    flops = 2.0 * rows * (64 * state + heads * 64 * (64 + 2 * state))
    yield from _both(
        lambda *given: call(
            *given, cu_seqlens=ends, max_seqlen=rows, dt_limits=(0.0, 1.0)
        )[0],
        [x, dt, a_log, b, c],
        forward=(size + out, flops), backward=(2 * size + out, 2 * flops),
    )  # fmt: skip


def _gated_delta_rule(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    # As in Qwen3-Next: twice as many value heads as key heads, all of 128.
    rows, heads = max(of.tokens // 2, 1), max(of.hidden // _HEAD // 2, 1) * 2
    q, k = (make(rows, heads // 2, _HEAD) for _ in range(2))
    k = torch.nn.functional.normalize(k, dim=-1)
    v, beta = make(rows, heads, _HEAD), make(rows, heads).sigmoid()
    g = -make(rows, heads, kind=torch.float32).abs() * 0.1
    ends = torch.tensor([0, rows], dtype=torch.int32, device=q.device)
    size = float(sum(one.numel() * one.itemsize for one in (q, k, v, g, beta)))
    out = float(v.numel() * v.itemsize)
    # Keys and queries with keys, the system and its solution, states read twice and written.
    flops = 2.0 * rows * heads * (64 * 2 * _HEAD + 64 * 3 * _HEAD + 4 * _HEAD * _HEAD)
    yield from _both(
        lambda *given: call(*given, cu_seqlens=ends, max_seqlen=rows)[0], [q, k, v, g, beta],
        forward=(size + out, flops), backward=(2 * size + out, 2 * flops),
    )  # fmt: skip


def _sample(call: Any, of: Sizes, make: Make) -> Iterator[Work]:
    rows = 64
    # As spread as those of a language model: a few hundred entries have nearly all of the weight.
    logits = make(rows, 8 * of.hidden, kind=torch.float32).mul_(2.5)
    draws = torch.rand(rows, device=logits.device, dtype=torch.float64)
    heat, most, share = (torch.full((rows,), x, device=logits.device) for x in (0.7, 50, 0.9))
    for name, cuts in (
        ("64 rows, top 50", {"top_k": most}),
        ("64 rows, share of 0.9", {"top_p": share}),
        ("64 rows, uncut", {}),
    ):
        run = partial(call, logits, draws, temperature=heat, **cuts)
        yield Work(name=name, run=run, num_bytes=4.0 * logits.numel())


_WORKS: dict[str, Callable[[Any, Sizes, Make], Iterator[Work]]] = {
    "linear": _linear,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "layer_norm": _layer_norm,
    "l2_norm": _l2_norm,
    "swiglu": _gated,
    "glu": _gated,
    "gelu": _plain,
    "activation": _plain,
    "rope": _rope,
    "attention": _attention,
    "paged_attention": _paged_attention,
    "cross_entropy": _cross_entropy,
    "moe_route": _moe_route,
    "moe_permute": _moe_permute,
    "grouped_linear": _grouped_linear,
    "quantize": _quantize,
    "fp8_matmul": _fp8_matmul,
    "adam": _adam,
    "grad_stats": _grad_stats,
    "causal_conv1d": _causal_conv1d,
    "ssd_scan": _ssd_scan,
    "gated_delta_rule": _gated_delta_rule,
    "sample": _sample,
}

BENCHED = tuple(_WORKS)
"""Operators that are measured."""
