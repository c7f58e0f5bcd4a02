"""A gradient that is differentiated again is right, or there is an error: never a wrong number."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_kernels import OPERATORS, RoutingRule, Target, resolve

TARGET = Target(dtype=torch.float64)
ENDS = torch.tensor([0, 3, 7], dtype=torch.int32)
PACKED = {
    "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "max_seqlen_q": 4, "max_seqlen_k": 4,
}  # fmt: skip
SCAN = {"cu_seqlens": ENDS, "max_seqlen": 4, "chunk_size": 2}
ANGLE = torch.linspace(0.0, 2.0, 14, dtype=torch.float64).view(7, 2)
PLAIN = torch.full((7, 2), 0.5, dtype=torch.float64)

Call = Callable[..., Tensor]
CALLS: dict[str, tuple[Call, list[tuple[int, ...]]]] = {
    "linear": (lambda f, x, w: f(x, w), [(7, 4), (3, 4)]),
    "rms_norm": (lambda f, x, w: f(x, w, 1e-5), [(7, 4), (4,)]),
    "add_rms_norm": (lambda f, x, r, w: f(x, r, w, 1e-5)[0], [(7, 4), (7, 4), (4,)]),
    "layer_norm": (lambda f, x, w, b: f(x, w, b, 1e-5), [(7, 4), (4,), (4,)]),
    "l2_norm": (lambda f, x: f(x, 1e-5), [(7, 4)]),
    "swiglu": (lambda f, x: f(x), [(7, 4)]),
    "glu": (lambda f, x, b: f(x, b), [(7, 4), (4,)]),
    "gelu": (lambda f, x: f(x), [(7, 4)]),
    "activation": (lambda f, x, b: f(x, b), [(7, 4), (4,)]),
    "rope": (lambda f, q, k: torch.cat(f(q, k, ANGLE.cos(), ANGLE.sin()), 1), [(7, 2, 4)] * 2),
    "attention": (lambda f, q, k, v: f(q, k, v, **PACKED)[0], [(7, 2, 4), (7, 1, 4), (7, 1, 4)]),
    "moe_route": (
        lambda f, z: f(z, rule=RoutingRule(top_k=2, normalise=True, score="sigmoid"))[0],
        [(7, 4)],
    ),
    "grouped_linear": (lambda f, x, w: f(x, w, (3, 4)), [(7, 4), (2, 3, 4)]),
    "causal_conv1d": (
        lambda f, x, w: f(x, w, silu=True, cu_seqlens=ENDS)[0],
        [(7, 4), (4, 3)],
    ),
    "ssd_scan": (
        lambda f, x, dt, b, c: f(x, dt, PLAIN[0], b, c, **SCAN)[0],
        [(7, 2, 3), (7, 2), (7, 1, 3), (7, 1, 3)],
    ),
    "gated_delta_rule": (
        lambda f, q, k, v: f(q, 0.5 * k, v, -PLAIN, PLAIN, **SCAN)[0],
        [(7, 2, 3)] * 3,
    ),
}


def able() -> Iterator[tuple[str, str]]:
    for op in CALLS:
        for one in OPERATORS[op].implementations:
            if one.refusal(TARGET) is None:
                yield op, one.name


@pytest.mark.parametrize(("op", "name"), list(able()))
def test_it_is_right_or_an_error(op: str, name: str) -> None:
    call, shapes = CALLS[op]
    fn = resolve(op, target=TARGET, require=name)
    generator = torch.Generator().manual_seed(0)

    def make(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def penalty(*tensors: Tensor) -> Tensor:
        found = torch.autograd.grad(call(fn, *tensors).square().sum(), tensors, create_graph=True)
        return sum((one.square().sum() for one in found), torch.zeros(()))

    def at(step: float, along: list[Tensor]) -> float:
        moved = zip(tensors, along, strict=True)
        return penalty(*(x.detach().add(d, alpha=step).requires_grad_() for x, d in moved)).item()

    tensors = [make(shape).requires_grad_() for shape in shapes]
    try:
        found: list[Any] = list(torch.autograd.grad(penalty(*tensors), tensors))
    except RuntimeError:
        return
    along = [make(shape) for shape in shapes]
    slope = sum(float((one * d).sum()) for one, d in zip(found, along, strict=True))
    assert slope == pytest.approx((at(1e-6, along) - at(-1e-6, along)) / 2e-6, rel=1e-4, abs=1e-4)


def test_the_error_says_why() -> None:
    x = torch.ones(3, 2, 4, requires_grad=True)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 3, "max_seqlen_k": 3}
    out, _ = resolve("attention", target=Target())(x, x, x, **lengths)
    (found,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        found.sum().backward()
