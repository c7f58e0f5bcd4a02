"""Where a rank stands: the sizes of a layout, and which of its groups stay within a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_parallel.axes import AxisView
from mcore_parallel.config import ParallelConfig
from mcore_parallel.cost.machines import Machine, Reach
from mcore_parallel.cost.work import Workload


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank's share of a micro-batch and the links of its groups.

    tokens: of a micro-batch on this rank between tensor parallel regions without sequence
    parallelism (micro_batch · seq_length / cp). share: what of them norms and residuals see.
    """

    tp: int
    cp: int
    ep: int
    etp: int
    sequence_parallel: bool
    dispatcher: str
    micro_batch: int
    seq_length: int
    machine: Machine
    tp_link: Reach
    cp_link: Reach
    ep_link: Reach
    etp_link: Reach

    @property
    def tokens(self) -> float:
        """See above."""
        return self.micro_batch * self.seq_length / self.cp

    @property
    def share(self) -> float:
        """See above."""
        return self.tokens / self.tp if self.sequence_parallel else self.tokens


def reach(machine: Machine, view: AxisView, axes: Sequence[str]) -> Reach:
    """Return the links of the group along `axes` that holds rank 0."""
    size, inside = 1, [0]
    for axis in axes:
        stride, length = view.stride(axis), view.size(axis)
        size *= length
        steps = range(0, min(length * stride, machine.gpus_per_node), stride)
        inside = [base + step for base in inside for step in steps]
    per_node = sum(rank < machine.gpus_per_node for rank in inside)
    return Reach(machine=machine, size=size, per_node=min(per_node, size))


def place(config: ParallelConfig, machine: Machine, work: Workload) -> Place:
    """Return what a rank of a resolved layout sees of a micro-batch."""
    dense, expert = config.dense_view(), config.expert_view()
    assert config.etp is not None
    return Place(
        tp=config.tp,
        cp=config.cp,
        ep=config.ep,
        etp=config.etp,
        sequence_parallel=config.sequence_parallel and config.tp > 1,
        dispatcher=config.dispatcher,
        micro_batch=work.micro_batch,
        seq_length=work.seq_length,
        machine=machine,
        tp_link=reach(machine, dense, ["tp"]),
        cp_link=reach(machine, dense, ["cp"]),
        ep_link=reach(machine, expert, ["ep"]),
        etp_link=reach(machine, expert, ["etp"]),
    )
