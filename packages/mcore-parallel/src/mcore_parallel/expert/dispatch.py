"""Token dispatch: every token goes to the ranks of its experts, and their outputs come back.

N tokens of this rank, k experts for each, E experts in all, e = E / ep of them here, H hidden,
R rows that arrive here. Rows are copies of tokens, one for each choice of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mcore_parallel.collectives import all_gather, all_to_all, exchange
from mcore_parallel.expert.permute import copies_in_order, in_order, inverse_of
from mcore_parallel.group import Group

__all__ = ["AllToAll", "Dispatched", "Dispatcher"]


class Dispatched(Protocol):
    """Tokens where their experts are."""

    @property
    def rows(self) -> Tensor:
        """The tokens [R, H] that chose an expert of this rank, expert by expert."""

    @property
    def counts(self) -> tuple[int, ...]:
        """How many of the rows each of the e experts here gets; 0 is possible."""

    def combine(self, outputs: Tensor) -> Tensor:
        """Return what the experts made of my tokens, [N, k, H] in the order of the choices.

        `outputs` [R, H] belong to `rows`. Where an expert is cut over several ranks, each of them
        passes its share of a sum. Collective like the dispatch; gradients travel back.
        """


class Dispatcher(Protocol):
    """Moves tokens between the ranks that route them and those that hold their experts."""

    def __call__(self, tokens: Tensor, experts: Tensor) -> Dispatched:
        """Send `tokens` [N, H] to their `experts` [N, k], int64 numbers from 0 to E - 1.

        All ranks of the group call it together, each with tokens of its own; N may differ and be
        0. Gradients travel back to the tokens.
        """


class AllToAll:
    """`Dispatcher` by all-to-all over `ep`, in which only rows that are needed travel.

    Each rank of `ep` holds the next E / ep experts. Within an `etp` group, which cuts every expert,
    rows are then gathered, and the shares of the outputs summed on their way back: each of its
    ranks routes tokens of its own, like all others. The counts are exchanged first and read on the
    host, one synchronisation for each call.

    num_experts: E. ep: the ranks over which experts are dealt out. etp: those that share them.

    Raises:
        ValueError: the experts cannot be dealt out over `ep`.
    """

    def __init__(self, num_experts: int, *, ep: Group, etp: Group) -> None:
        check_experts("AllToAll", num_experts, ep)
        self.num_experts = num_experts
        self.ep = ep
        self.etp = etp

    def __call__(self, tokens: Tensor, experts: Tensor) -> Dispatched:
        """See `Dispatcher`."""
        choices, order = experts.flatten().sort(stable=True)
        route = self._route(choices)
        inverse = inverse_of(order)
        rows = copies_in_order(tokens, experts.shape[1], order, inverse)
        rows = exchange(rows, self.ep, route.received, route.sent)
        rows = _gather_rows(rows, self.etp, route.gathered)
        if route.by_expert is not None:
            rows = in_order(rows, *route.by_expert)
        return _Sent(
            rows=rows,
            counts=route.counts,
            route=route,
            order=(order, inverse),
            shape=(*experts.shape, tokens.shape[1]),
            groups=(self.ep, self.etp),
        )

    def _route(self, choices: Tensor) -> _Route:
        """Work out who gets how many rows, from my chosen experts in ascending order."""
        ep, etp = self.ep, self.etp
        local = self.num_experts // ep.size
        bounds = torch.arange(self.num_experts + 1, device=choices.device)
        sent = torch.searchsorted(choices, bounds).diff()
        received = all_to_all(sent, ep).view(1, ep.size, local)
        arriving = all_gather(received, etp)  # [etp, ep, e], in the order in which rows arrive
        numbers = torch.cat([sent, arriving.flatten()]).tolist()
        table = torch.tensor(numbers[self.num_experts :]).view(etp.size, ep.size, local)
        by_expert = None
        if etp.size * ep.size > 1:
            expert = torch.arange(local, device=choices.device).repeat(etp.size * ep.size)
            of_row = expert.repeat_interleave(arriving.flatten(), output_size=int(table.sum()))
            order = of_row.argsort(stable=True)
            by_expert = order, inverse_of(order)
        return _Route(
            sent=[sum(numbers[r * local : (r + 1) * local]) for r in range(ep.size)],
            received=table[etp.rank].sum(-1).tolist(),
            gathered=table.sum((1, 2)).tolist(),
            counts=tuple(table.sum((0, 1)).tolist()),
            by_expert=by_expert,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Route:
    """Numbers of rows: to and from each rank of ep, of each rank of etp, and of each expert here.

    by_expert: the permutation that sorts arriving rows by expert, and its inverse.
    """

    sent: list[int]
    received: list[int]
    gathered: list[int]
    counts: tuple[int, ...]
    by_expert: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sent:
    """`Dispatched` by `AllToAll`: the rows, and the way back."""

    rows: Tensor
    counts: tuple[int, ...]
    route: _Route
    order: tuple[Tensor, Tensor]
    shape: tuple[int, ...]
    groups: tuple[Group, Group]

    def combine(self, outputs: Tensor) -> Tensor:
        """See `Dispatched`."""
        ep, etp = self.groups
        route = self.route
        if route.by_expert is not None:
            order, inverse = route.by_expert
            outputs = in_order(outputs, inverse, order)
        outputs = _sum_rows(outputs, etp, route.gathered)
        outputs = exchange(outputs, ep, route.sent, route.received)
        order, inverse = self.order
        return in_order(outputs, inverse, order).view(self.shape)


def check_experts(what: str, num_experts: int, ep: Group) -> None:
    """Raise ValueError unless the experts can be dealt out over the group, equally many each."""
    if num_experts < 1 or num_experts % ep.size:
        fitting = [str(d) for d in range(1, num_experts + 1) if num_experts % d == 0]
        raise ValueError(
            f"{what}: {num_experts} experts cannot be dealt out over ep={ep.size} ranks; "
            f"valid ep: {', '.join(fitting)}"
        )


def _gather_rows(rows: Tensor, group: Group, counts: list[int]) -> Tensor:
    """Return the rows of all ranks, counts[r] from rank r; gradients are summed on the way back."""
    if group.size == 1:
        return rows
    spread = rows.repeat(group.size, *[1] * (rows.dim() - 1))
    return exchange(spread, group, counts, [rows.shape[0]] * group.size)


def _sum_rows(rows: Tensor, group: Group, counts: list[int]) -> Tensor:
    """Return the sum over the ranks of my rows; the opposite of `_gather_rows`."""
    if group.size == 1:
        return rows
    mine = counts[group.rank]
    parts = exchange(rows, group, [mine] * group.size, counts)
    return parts.view(group.size, mine, *rows.shape[1:]).sum(0)
