"""Token dispatch by all-to-all: only rows that are needed travel.

Letters as in `dispatch`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel.collectives import all_gather, all_to_all
from mcore_parallel.expert.dispatch import check_experts, gather_rows, sum_rows
from mcore_parallel.expert.permute import PermuteOp, RowOrder, TorchPermute
from mcore_parallel.expert.transit import Transit, start_exchange
from mcore_parallel.group import Group

__all__ = ["AllToAll"]


class AllToAll:
    """`Dispatcher` by all-to-all over `ep`, in which only rows that are needed travel.

    Within an `etp` group, which cuts every expert, rows are then gathered, and the shares of the
    outputs summed on their way back. The counts are exchanged first and read on the host, one
    synchronisation for each call. Outputs are weighted where their tokens came from.

    Args: see `DispatcherFactory`.

    Raises:
        ValueError: the experts cannot be dealt out over `ep`.
    """

    def __init__(
        self,
        num_experts: int,
        *,
        ep: Group,
        etp: Group,
        permute: PermuteOp | None = None,
        overlap: bool = True,
    ) -> None:
        check_experts("AllToAll", num_experts, ep)
        self.num_experts = num_experts
        self.ep = ep
        self.etp = etp
        self.permute: PermuteOp = permute or TorchPermute()
        self.overlap = overlap

    def __call__(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> _OnTheWay:
        """See `Dispatcher`."""
        choices, order = experts.flatten().sort(stable=True)
        route = self._route(choices)
        # Those that go nowhere come first.
        chosen = RowOrder.of(
            order[order.numel() - sum(route.sent) :], order.numel(), experts.shape[1]
        )
        rows = self.permute.permute(tokens, chosen)
        transit = start_exchange(rows, self.ep, route.received, route.sent, overlap=self.overlap)
        return _OnTheWay(dispatcher=self, route=route, order=chosen, weights=weights, rows=transit)

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
            by_expert = RowOrder.of(order, order.numel())
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

    by_expert: the order of arriving rows that sorts them by expert.
    """

    sent: list[int]
    received: list[int]
    gathered: list[int]
    counts: tuple[int, ...]
    by_expert: RowOrder | None


@dataclass(frozen=True, kw_only=True, eq=False)
class _OnTheWay:
    """`Dispatching` by `AllToAll`."""

    dispatcher: AllToAll
    route: _Route
    order: RowOrder
    weights: Tensor
    rows: Transit

    def wait(self) -> _Arrived:
        """See `Dispatching`."""
        rows = gather_rows(self.rows.wait(), self.dispatcher.etp, self.route.gathered)
        if self.route.by_expert is not None:
            rows = self.dispatcher.permute.permute(rows, self.route.by_expert)
        return _Arrived(rows=rows, counts=self.route.counts, sent=self)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Arrived:
    """`Dispatched` by `AllToAll`: the rows, and the way back."""

    rows: Tensor
    counts: tuple[int, ...]
    sent: _OnTheWay

    def combine(self, outputs: Tensor) -> _Returning:
        """See `Dispatched`."""
        dispatcher, route = self.sent.dispatcher, self.sent.route
        if route.by_expert is not None:
            outputs = dispatcher.permute.unpermute(outputs, None, route.by_expert)
        outputs = sum_rows(outputs, dispatcher.etp, route.gathered)
        transit = start_exchange(
            outputs, dispatcher.ep, route.sent, route.received, overlap=dispatcher.overlap
        )
        return _Returning(sent=self.sent, outputs=transit)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Returning:
    """`Combining` by `AllToAll`."""

    sent: _OnTheWay
    outputs: Transit

    def wait(self) -> Tensor:
        """See `Combining`."""
        permute = self.sent.dispatcher.permute
        return permute.unpermute(self.outputs.wait(), self.sent.weights, self.sent.order)
