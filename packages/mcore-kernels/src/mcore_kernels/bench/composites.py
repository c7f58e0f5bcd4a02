"""What models do with several operators at once, measured as one, at the sizes of published models.

Shapes on a GPU (H hidden = 4,096): the head of Llama 3 with its loss over 128,256 classes, its
feed-forward up projection 4,096 × 14,336 in 8 bits, and the experts of Qwen3-30B-A3B (128, eight
for each token, 2,048 × 768). Elsewhere the same proportions with fewer classes and experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.bench.work import Make, Sizes, Work, drawn
from mcore_kernels.config import KernelConfig
from mcore_kernels.kernels import Kernels
from mcore_kernels.ops import OPERATORS
from mcore_kernels.ops.cross_entropy.head import fused_head_loss
from mcore_kernels.ops.cross_entropy.loss import VocabShard, vocab_loss
from mcore_kernels.ops.grouped_linear.fp8 import Fp8GroupedLinear
from mcore_kernels.ops.linear.fp8 import Fp8Linear
from mcore_kernels.quant.recipe import Fp8Recipe
from mcore_kernels.registry import resolve
from mcore_kernels.target import Target

Named = tuple[str, Work]


def composite(op: str, target: Target, sizes: Sizes, *, every: bool) -> Iterator[Named]:
    """The measured calls of one of `COMPOSITES`, each with the name of how it is done."""
    device = torch.device(target.device_type)
    yield from COMPOSITES[op](target, sizes, drawn(device, target.dtype), every)


def _rows(target: Target, sizes: Sizes) -> int:
    """Tokens of products that take a GPU some ten milliseconds; fewer elsewhere."""
    if target.device_type == "cuda":
        return min(sizes.tokens, 8192)
    return max(sizes.tokens // 8, 1)


def _head_loss(target: Target, sizes: Sizes, make: Make, every: bool) -> Iterator[Named]:
    kernels = Kernels(KernelConfig(), target)
    rows = _rows(target, sizes)
    classes = sizes.hidden * 2004 // 64 if target.device_type == "cuda" else 8 * sizes.hidden
    hidden, weight = make(rows, sizes.hidden), make(classes, sizes.hidden).mul_(0.02)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    labels = torch.arange(rows, device=hidden.device) % classes
    weights = torch.full((rows,), 1.0 / rows, device=hidden.device)
    buffer = torch.zeros(classes, sizes.hidden, device=hidden.device, dtype=torch.float32)
    shard, flops = VocabShard(vocab_size=classes), 6.0 * rows * sizes.hidden * classes

    def fused() -> None:
        found = fused_head_loss(
            hidden, weight, labels, linear=kernels.linear, op=kernels.cross_entropy, shard=shard,
            weights=weights, weight_grad_out=buffer,
        )  # fmt: skip
        torch.autograd.grad(found.total, hidden)

    def apart() -> None:
        logits = torch.nn.functional.linear(hidden, weight)
        losses = vocab_loss(
            logits, labels, op=kernels.cross_entropy, shard=shard, weights=weights
        ).loss
        torch.autograd.grad(losses.sum(), (hidden, weight))

    fused_dtype = target.dtype != torch.float64
    if fused_dtype:
        yield "fused", Work(name="loss and both gradients", run=fused, flops=flops)
    if every or not fused_dtype:
        yield "apart", Work(name="loss and both gradients", run=apart, flops=flops)


def _fp8_linear(target: Target, sizes: Sizes, make: Make, every: bool) -> Iterator[Named]:
    rows, wide = _rows(target, sizes), sizes.hidden * 7 // 2
    x, weight = make(rows, sizes.hidden), make(wide, sizes.hidden).mul_(0.02)
    x, weight, dy = x.requires_grad_(), weight.requires_grad_(), make(rows, wide)
    flops = 6.0 * rows * sizes.hidden * wide

    def work(linear: Callable[[Tensor, Tensor], Tensor]) -> Work:
        def run() -> None:
            torch.autograd.grad(linear(x, weight), (x, weight), dy)

        return Work(name="forward and backward", run=run, flops=flops)

    yield str(target.dtype).removeprefix("torch."), work(torch.nn.functional.linear)
    for scaling in ("tensor", "row", "block") if every else ("tensor",):
        recipe = Fp8Recipe(scaling=scaling)
        if recipe.refusal(target) is None or target.device_type == "cpu":
            emulate = target.device_type == "cpu"
            yield f"fp8 {scaling}", work(Fp8Linear(recipe, target, emulate=emulate))
            # As in training, where a weight is encoded once for all micro-batches of a step.
            keeps = Fp8Linear(recipe, target, emulate=emulate, keeps_weight=True)
            yield f"fp8 {scaling}, weight encoded before", work(keeps)


def _experts(target: Target, sizes: Sizes, make: Make, every: bool) -> Iterator[Named]:
    cuda = target.device_type == "cuda"
    experts, copies = (128, 8) if cuda else (8, 2)
    names = [resolve("grouped_linear", target=target).name]
    if every:
        ranked = OPERATORS["grouped_linear"].ranked()
        names = [one.name for one in ranked if one.refusal(target) is None]
    tokens = sizes.tokens if cuda else _rows(target, sizes)
    rows, hidden, inner = tokens * copies, sizes.hidden // 2, sizes.hidden * 3 // 16
    for label, wide, narrow in (("up", 2 * inner, hidden), ("down", hidden, inner)):
        x, weight, dy = make(rows, narrow), make(experts, wide, narrow), make(rows, wide)
        counts = torch.full((experts,), rows // experts, device=x.device)
        counts[0] += rows - int(counts.sum())
        buffer = torch.zeros(experts, wide, narrow, device=x.device, dtype=torch.float32)
        flops = 2.0 * rows * wide * narrow
        yield "dense", Work(name=label, run=partial(torch.matmul, x, weight[0].t()), flops=flops)
        for name in names:
            op: Any = resolve("grouped_linear", target=target, require=name)
            for spread, given in {"": counts, ", uneven": _uneven(counts)}.items():
                for what, run in (
                    ("forward", partial(op.forward, x, weight, given)),
                    ("input gradient", partial(op.input_grad, dy, weight, given)),
                    ("weight gradient added", partial(op.weight_grad, dy, x, given, buffer)),
                ):
                    if every or not spread:
                        yield name, Work(name=f"{label}, {what}{spread}", run=run, flops=flops)
        if every and Fp8Recipe().refusal(target) is None:
            # With all casts but the weight's, which in training is one for all micro-batches.
            fp8 = Fp8GroupedLinear(
                Fp8Recipe(), experts, target, emulate=not cuda, keeps_weight=True
            )
            arguments = (x.requires_grad_(), weight.requires_grad_(), counts)
            for name, op in ((names[0], resolve("grouped_linear", target=target)), ("fp8", fp8)):
                run = partial(_there_and_back, op, arguments, dy)
                yield name, Work(name=f"{label}, forward and backward", run=run, flops=3 * flops)


def _uneven(counts: Tensor) -> Tensor:
    """As many rows in all, from none for the first expert to twice the mean for the last."""
    share = torch.arange(len(counts), device=counts.device)
    found = share * counts.sum() // share.sum()
    found[-1] += counts.sum() - found.sum()
    return found


def _there_and_back(op: Any, given: tuple[Any, ...], dy: Tensor) -> None:
    torch.autograd.grad(op(*given), given[:2], dy)


COMPOSITES: dict[str, Callable[[Target, Sizes, Make, bool], Iterator[Named]]] = {
    "head_loss": _head_loss,
    "fp8_linear": _fp8_linear,
    "experts": _experts,
}
"""By name, as `mcore-kernels bench --op` takes it."""
