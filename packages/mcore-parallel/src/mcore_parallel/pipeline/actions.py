"""What a pipeline stage does, one `Action` after another.

A schedule is data: for every stage the list of its actions, in order. `check` proves that such
lists fit together, `simulate` says how long they take, `run_schedule` executes this rank's list.

A stage holds one or more chunks of consecutive layers. The chunks of all stages form a line of
num_stages · num_chunks virtual stages, dealt out in turn: chunk c of stage s is number
c · num_stages + s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["F", "B", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]

_PARTNER: dict[Kind, tuple[Kind, int]] = {
    # kind: (kind at the other end, where that end lies in the line of virtual stages)
    "SEND_F": ("RECV_F", +1),
    "RECV_F": ("SEND_F", -1),
    "SEND_B": ("RECV_B", -1),
    "RECV_B": ("SEND_B", +1),
}


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one stage.

    kind: F forward; B backward (only its input-gradient half when the schedule has W actions,
    which are the weight-gradient half); SEND_F and RECV_F pass activations on, SEND_B and RECV_B
    gradients back. stage: who does it. chunk: which of the stage's chunks. micro_batch: for which
    micro-batch.
    """

    kind: Kind
    stage: int
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of chunk {self.chunk}, micro-batch {self.micro_batch}"

    @property
    def is_send(self) -> bool:
        """Whether it sends; sends never block."""
        return self.kind.startswith("SEND")

    @property
    def is_receive(self) -> bool:
        """Whether it receives; a receive blocks until the message is there."""
        return self.kind.startswith("RECV")

    @property
    def is_backward(self) -> bool:
        """Whether training needs it and evaluation does not."""
        return self.kind in ("B", "W", "SEND_B", "RECV_B")


Schedule: TypeAlias = Sequence[Sequence[Action]]
"""The actions of every stage, in order."""


def partner(action: Action, num_stages: int) -> Action:
    """Return the receive that takes what the send `action` sends, or the other way round.

    Before the first and after the last chunk of the line the result names a chunk that does not
    exist.
    """
    kind, step = _PARTNER[action.kind]
    chunk, stage = divmod(action.chunk * num_stages + action.stage + step, num_stages)
    return Action(kind, stage, chunk, action.micro_batch)


def num_chunks(actions: Sequence[Action]) -> int:
    """Return how many chunks of one stage these actions drive."""
    return 1 + max((action.chunk for action in actions), default=0)
