"""Token dispatch where all experts are whole on this rank and every choice goes to one of them.

Letters as in `dispatch`; R = N · k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel.expert.dispatch import check_experts
from mcore_parallel.expert.permute import PermuteOp, RowOrder
from mcore_parallel.group import Group

__all__ = ["Local"]


class Local:
    """`Dispatcher` that puts rows in the order of experts, and brings no number to the host.

    How many rows there are is known without their counts, since no choice is -1; the counts stay on
    the device of the tokens. Results and gradients are those of `AllToAll`, bit for bit.
    `make_dispatcher` chooses it.

    Args: see `DispatcherFactory`.

    Raises:
        ValueError: the experts lie on several ranks.
    """

    def __init__(
        self, num_experts: int, *, ep: Group, etp: Group, permute: PermuteOp, overlap: bool = True
    ) -> None:
        check_experts("Local", num_experts, ep)
        if ep.size * etp.size > 1:
            raise ValueError(
                f"Local: experts lie on ep={ep.size} × etp={etp.size} ranks, where tokens travel: "
                f"use all-to-all or all-gather"
            )
        self.num_experts = num_experts
        self.permute = permute
        self.overlap = overlap

    def __call__(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> _InOrder:
        """See `Dispatcher`; no choice may be -1."""
        choices, order = experts.flatten().sort(stable=True)
        bounds = torch.arange(self.num_experts + 1, device=choices.device)
        chosen = RowOrder.of(order, order.numel(), experts.shape[1])
        return _InOrder(
            rows=self.permute.permute(tokens, chosen),
            counts=torch.searchsorted(choices, bounds).diff(),
            order=chosen,
            weights=weights,
            permute=self.permute,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _InOrder:
    """`Dispatching` and `Dispatched` by `Local`: nothing is under way."""

    rows: Tensor
    counts: Tensor
    order: RowOrder
    weights: Tensor
    permute: PermuteOp

    def wait(self) -> _InOrder:
        """See `Dispatching`."""
        return self

    def combine(self, outputs: Tensor) -> _Outputs:
        """See `Dispatched`."""
        return _Outputs(sent=self, outputs=outputs)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Outputs:
    """`Combining` by `Local`."""

    sent: _InOrder
    outputs: Tensor

    def wait(self) -> Tensor:
        """See `Combining`."""
        return self.sent.permute.unpermute(self.outputs, self.sent.weights, self.sent.order)
