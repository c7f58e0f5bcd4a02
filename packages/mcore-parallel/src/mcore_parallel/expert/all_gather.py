"""Token dispatch by all-gather: every rank sees all tokens and takes those of its experts.

Letters as in `dispatch`; M tokens of all ranks together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel.collectives import all_gather
from mcore_parallel.expert.dispatch import (
    check_experts,
    gather_rows,
    spread,
    sum_parts,
    sum_rows,
)
from mcore_parallel.expert.permute import PermuteOp, RowOrder, TorchPermute
from mcore_parallel.expert.transit import Transit, start_exchange
from mcore_parallel.group import Group

__all__ = ["AllGather"]


class AllGather:
    """`Dispatcher` by all-gather of the tokens over `ep` and `etp`, and a sum of the outputs back.

    Each rank sends every token once to every other, whatever its choices: less than by all-to-all
    where k is near the number of ranks or above it, and in messages of equal size. Outputs are
    weighted where the experts are, and the sum over the ranks is at the precision of the weights
    (fp32), in which they travel back. How many tokens each rank has and how many rows there are for
    each expert is read on the host, two synchronisations for each call.

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
        check_experts("AllGather", num_experts, ep)
        self.num_experts = num_experts
        self.ep = ep
        self.etp = etp
        self.permute: PermuteOp = permute or TorchPermute()
        self.overlap = overlap

    def __call__(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> _OnTheWay:
        """See `Dispatcher`."""
        size = torch.tensor([[tokens.shape[0]]], device=tokens.device)
        table = all_gather(all_gather(size, self.ep, 1), self.etp).tolist()
        of_ep = table[self.etp.rank]
        transit = start_exchange(
            spread(tokens, self.ep) if self.ep.size > 1 else tokens,
            self.ep,
            of_ep,
            [tokens.shape[0]] * self.ep.size,
            overlap=self.overlap,
        )
        of_etp = [sum(row) for row in table]
        return _OnTheWay(
            dispatcher=self,
            tokens=transit,
            experts=gather_rows(gather_rows(experts, self.ep, of_ep), self.etp, of_etp),
            weights=gather_rows(gather_rows(weights, self.ep, of_ep), self.etp, of_etp),
            sizes=(of_ep, of_etp),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _OnTheWay:
    """`Dispatching` by `AllGather`. sizes: tokens of each rank of ep, and of each of etp's."""

    dispatcher: AllGather
    tokens: Transit
    experts: Tensor
    weights: Tensor
    sizes: tuple[list[int], list[int]]

    def wait(self) -> _Arrived:
        """See `Dispatching`."""
        dispatcher = self.dispatcher
        local = dispatcher.num_experts // dispatcher.ep.size
        mine = self.experts.flatten() - dispatcher.ep.rank * local
        choices, order = torch.where((mine < 0) | (mine >= local), local, mine).sort(stable=True)
        bounds = torch.arange(local + 1, device=choices.device)
        counts = torch.searchsorted(choices, bounds).diff().tolist()
        chosen = RowOrder.of(order[: sum(counts)], order.numel(), self.experts.shape[1])
        tokens = gather_rows(self.tokens.wait(), dispatcher.etp, self.sizes[1])
        return _Arrived(
            rows=dispatcher.permute.permute(tokens, chosen),
            counts=tuple(counts),
            order=chosen,
            sent=self,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Arrived:
    """`Dispatched` by `AllGather`: the rows, and the way back."""

    rows: Tensor
    counts: tuple[int, ...]
    order: RowOrder
    sent: _OnTheWay

    def combine(self, outputs: Tensor) -> _Returning:
        """See `Dispatched`."""
        dispatcher, weights = self.sent.dispatcher, self.sent.weights
        of_ep, of_etp = self.sent.sizes
        precise = torch.promote_types(outputs.dtype, weights.dtype)
        sums = dispatcher.permute.unpermute(outputs.to(precise), weights, self.order)
        sums = sum_rows(sums, dispatcher.etp, of_etp)
        ep = dispatcher.ep
        mine = [of_ep[ep.rank]] * ep.size
        transit = start_exchange(sums, ep, mine, of_ep, overlap=dispatcher.overlap)
        return _Returning(sums=transit, ep=ep, dtype=outputs.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Returning:
    """`Combining` by `AllGather`."""

    sums: Transit
    ep: Group
    dtype: torch.dtype

    def wait(self) -> Tensor:
        """See `Combining`."""
        sums = self.sums.wait()
        return (sum_parts(sums, self.ep) if self.ep.size > 1 else sums).to(self.dtype)
