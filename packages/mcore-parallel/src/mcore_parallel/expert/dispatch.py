"""Token dispatch: every token goes to the ranks of its experts, and their outputs come back.

N tokens of this rank, k experts for each, E experts in all, e = E / ep of them here, H hidden,
R rows that arrive here. Rows are copies of tokens, one for each choice of an expert.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mcore_parallel.collectives import exchange
from mcore_parallel.expert.permute import PermuteOp
from mcore_parallel.expert.rows_of import Counts
from mcore_parallel.group import Group

__all__ = [
    "Combining",
    "Dispatched",
    "Dispatcher",
    "DispatcherFactory",
    "Dispatching",
    "check_experts",
    "gather_rows",
    "sum_rows",
]


class Combining(Protocol):
    """Outputs of experts on their way back."""

    def wait(self) -> Tensor:
        """Return what the experts made of my tokens, [N, H]: the sum weighted as they were sent.

        In the dtype of the tokens. Once.
        """


class Dispatched(Protocol):
    """Tokens where their experts are."""

    @property
    def rows(self) -> Tensor:
        """The tokens [R, H] that chose an expert of this rank, expert by expert."""

    @property
    def counts(self) -> Counts:
        """How many of the rows each of the e experts here gets; 0 is possible.

        Numbers on the host, or a tensor [e] int64 on the device of the rows if the dispatcher does
        not need them there: whoever takes them takes both, and reads no tensor back without need.
        """

    def combine(self, outputs: Tensor) -> Combining:
        """Send `outputs` [R, H], which belong to `rows`, back to where their tokens came from.

        Where an expert is cut over several ranks, each of them passes its share of a sum.
        Collective like the dispatch; gradients travel back.
        """


class Dispatching(Protocol):
    """Tokens on their way."""

    def wait(self) -> Dispatched:
        """Return them once they have arrived; what was computed before this has hidden the way."""


class Dispatcher(Protocol):
    """Moves tokens between the ranks that route them and those that hold their experts."""

    def __call__(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Dispatching:
        """Send `tokens` [N, H] to their `experts` [N, k], int64 numbers from 0 to E - 1, or -1.

        A choice of -1 goes nowhere and adds nothing to the result. `weights` [N, k] are those by
        which outputs are multiplied, fp32 or finer. All ranks of the groups call it together, each
        with tokens of its own; N may differ and be 0. Gradients travel back to tokens and weights.
        """


class DispatcherFactory(Protocol):
    """Makes the `Dispatcher` of a layer: the classes here, and what other packages register."""

    def __call__(
        self, num_experts: int, /, *, ep: Group, etp: Group, permute: PermuteOp, overlap: bool
    ) -> Dispatcher:
        """Return the dispatcher over these ranks.

        Args:
            num_experts: E.
            ep: the ranks over which experts are dealt out: each holds the next E / ep of them.
            etp: the ranks that share the experts here, of which each routes tokens of its own.
            permute: moves copies of tokens to rows and back.
            overlap: whether rows travel while other things are computed.

        Raises:
            ValueError: it cannot work here; one line that says why.
        """


def check_experts(what: str, num_experts: int, ep: Group) -> None:
    """Raise ValueError unless the experts can be dealt out over the group, equally many each."""
    if num_experts < 1 or num_experts % ep.size:
        fitting = [str(d) for d in range(1, num_experts + 1) if num_experts % d == 0]
        raise ValueError(
            f"{what}: {num_experts} experts cannot be dealt out over ep={ep.size} ranks; "
            f"valid ep: {', '.join(fitting)}"
        )


def gather_rows(rows: Tensor, group: Group, counts: list[int]) -> Tensor:
    """Return the rows of all ranks, counts[r] from rank r; gradients are summed on the way back."""
    if group.size == 1:
        return rows
    return exchange(spread(rows, group), group, counts, [rows.shape[0]] * group.size)


def spread(rows: Tensor, group: Group) -> Tensor:
    """Return one copy of all rows for each rank."""
    return rows.repeat(group.size, *[1] * (rows.dim() - 1))


def sum_rows(rows: Tensor, group: Group, counts: list[int]) -> Tensor:
    """Return the sum over the ranks of my rows; the opposite of `gather_rows`."""
    if group.size == 1:
        return rows
    mine = counts[group.rank]
    return sum_parts(exchange(rows, group, [mine] * group.size, counts), group)


def sum_parts(parts: Tensor, group: Group) -> Tensor:
    """Return the sum over equally many rows from each rank."""
    return parts.view(group.size, parts.shape[0] // group.size, *parts.shape[1:]).sum(0)
