"""What every dispatcher must hold, as a check that its author can run.

N tokens of this rank, k experts for each, E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel.expert.dispatch import Dispatcher, DispatcherFactory
from mcore_parallel.expert.permute import PermuteOp, TorchPermute
from mcore_parallel.group import Group

__all__ = ["DispatchCase", "check_dispatch", "dispatch_cases"]

_HIDDEN = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class DispatchCase:
    """Tokens of one rank: `tokens` [N, H], their `experts` [N, k] and `weights` [N, k]."""

    name: str
    tokens: Tensor
    experts: Tensor
    weights: Tensor


def dispatch_cases(
    num_experts: int,
    seed: int,
    *,
    is_first: bool = False,
    dtype: torch.dtype = torch.float32,
    drops: bool = True,
) -> Iterator[DispatchCase]:
    """Yield what may happen to one of several ranks, the same cases in the same order on each.

    `seed` is another on every rank, and one of them is the first: it has tokens where no other has.
    Without `drops` no choice is -1.
    """
    generator = torch.Generator().manual_seed(seed)

    def case(name: str, experts: Tensor) -> DispatchCase:
        tokens = torch.randn(len(experts), _HIDDEN, generator=generator, dtype=dtype)
        wide = torch.promote_types(dtype, torch.float32)
        weights = torch.rand(experts.shape, generator=generator, dtype=wide)
        return DispatchCase(name=name, tokens=tokens, experts=experts, weights=weights)

    def chosen(count: int, k: int) -> Tensor:
        order = torch.rand(count, num_experts, generator=generator).argsort(-1)
        return order[:, :k]

    k = min(2, num_experts)
    some = int(torch.randint(1, 9, (), generator=generator))
    yield case("as many tokens on every rank", chosen(6, k))
    yield case("another number of tokens on every rank", chosen(some, k))
    yield case("tokens on one rank alone", chosen(5 if is_first else 0, k))
    yield case("no token on any rank", chosen(0, k))
    yield case("every expert chosen by every token", chosen(3, num_experts))
    yield case("all tokens to the first expert", torch.zeros(4, 1, dtype=torch.int64))
    yield case("all tokens to the last expert", torch.full((4, 1), num_experts - 1))
    if not drops:
        return
    dropped = chosen(7, k)
    yield case("some choices dropped", dropped.masked_fill(dropped % 2 == 0, -1))
    yield case("all choices dropped", torch.full((4, k), -1))


def check_dispatch(
    factory: DispatcherFactory,
    *,
    ep: Group,
    etp: Group,
    num_experts: int | None = None,
    permute: PermuteOp | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    drops: bool = True,
) -> None:
    """Check a dispatcher over these ranks, all of which call it together.

    Expert e multiplies its rows by e + 1, of which each rank of `etp` gives an equal share. Outputs
    and the gradients of tokens and weights have to be those of that formula, with overlap and
    without, in every one of `dispatch_cases`.

    Args:
        factory: makes the dispatcher.
        ep, etp: see `DispatcherFactory`.
        num_experts: how many experts there are; default two for each rank of `ep`.
        permute, dtype, device: what the dispatcher is given to work with.
        drops: whether it takes choices of -1, as every `Dispatcher` of a factory does.

    Raises:
        AssertionError: names the case, and what differs.
    """
    experts = num_experts or 2 * ep.size
    for overlap in (True, False):
        op = permute or TorchPermute()
        dispatcher = factory(experts, ep=ep, etp=etp, permute=op, overlap=overlap)
        seed, first = 1 + ep.rank * etp.size + etp.rank, ep.rank == etp.rank == 0
        for case in dispatch_cases(experts, seed, is_first=first, dtype=dtype, drops=drops):
            _check_case(dispatcher, case, experts, (ep, etp), torch.device(device))


def _check_case(
    dispatcher: Dispatcher,
    case: DispatchCase,
    num_experts: int,
    groups: tuple[Group, Group],
    device: torch.device,
) -> None:
    ep, etp = groups
    tokens = case.tokens.to(device).requires_grad_()
    weights = case.weights.to(device).requires_grad_()
    experts = case.experts.to(device)
    arrived = dispatcher(tokens, experts, weights).wait()
    counts, rows = arrived.counts, arrived.rows
    counts = counts.tolist() if isinstance(counts, Tensor) else counts
    local = num_experts // ep.size
    if len(counts) != local or sum(counts) != len(rows):
        raise AssertionError(
            f"{case.name}: counts {list(counts)} for {len(rows)} rows of {local} experts"
        )
    numbers = torch.arange(1, local + 1, device=device) + ep.rank * local
    of_row = numbers.repeat_interleave(torch.tensor(counts, device=device)).to(rows.dtype)
    outputs = rows * (of_row / etp.size).unsqueeze(-1)
    found = arrived.combine(outputs).wait()
    # What a token is multiplied by, as a function of its weights.
    factors = (experts + 1).clamp(min=0).to(weights.dtype)
    want = tokens.detach() * (factors * weights.detach()).sum(-1, keepdim=True)
    direction = torch.linspace(-1, 1, want.numel(), device=device).view(want.shape)
    direction = direction.to(found.dtype)
    torch.autograd.backward((found * direction).sum())
    d_tokens = direction * (factors * weights.detach()).sum(-1, keepdim=True)
    d_weights = factors * (direction.to(weights.dtype) * tokens.detach()).sum(-1, keepdim=True)
    precision = torch.finfo(tokens.dtype).eps
    _compare(f"{case.name}: outputs", found.detach(), want, precision)
    _compare(f"{case.name}: gradients of tokens", tokens.grad, d_tokens, precision)
    _compare(f"{case.name}: gradients of weights", weights.grad, d_weights, precision)


def _compare(what: str, found: Tensor | None, want: Tensor, precision: float) -> None:
    if found is None or found.shape != want.shape:
        shape = None if found is None else list(found.shape)
        raise AssertionError(f"{what} of shape {shape}, not {list(want.shape)}")
    largest = float(want.abs().max()) if want.numel() else 0.0
    distance = (found.double() - want.double()).abs()
    if not bool((distance <= 16 * precision * (1 + largest)).all()):  # NaN is not
        raise AssertionError(f"{what} differ by up to {float(distance.max()):.3g}")
