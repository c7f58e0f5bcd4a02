"""What a pipeline stage does, one `Action` after another.

A schedule is data: for every stage the list of its actions, in order. `check` proves that such
lists fit together, `simulate` says how long they take, `run_schedule` executes this rank's list.

A stage holds one or more chunks of consecutive layers. The chunks of all stages form a `Line` of
virtual stages, through which a micro-batch passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
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
    micro-batch. paired: of a forward: the action after it is the backward of another micro-batch,
    and the two take turns; how an action is run, so that equality leaves it out.
    """

    kind: Kind
    stage: int
    chunk: int
    micro_batch: int
    paired: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        what = f"{self.kind} of chunk {self.chunk}, micro-batch {self.micro_batch}"
        return f"{what}, paired" if self.paired else what

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


@dataclass(frozen=True, kw_only=True)
class Line:
    """The chunks of all stages in the order in which a micro-batch passes through them.

    num_stages, num_chunks: each stage holds that many chunks. zigzag: the line turns at the last
    stage and at the first one (two chunks make a V); otherwise it starts again at the first stage:
    chunk c of stage s is then number c · num_stages + s.

    Neighbours in the line that lie on one stage hand tensors over without sending them.
    """

    num_stages: int
    num_chunks: int = 1
    zigzag: bool = False

    @property
    def last(self) -> int:
        """The position of the last virtual stage."""
        return self.num_stages * self.num_chunks - 1

    def position(self, stage: int, chunk: int) -> int:
        """Return where chunk `chunk` of stage `stage` stands in the line."""
        turned = self.zigzag and chunk % 2
        return chunk * self.num_stages + (self.num_stages - 1 - stage if turned else stage)

    def place(self, position: int) -> tuple[int, int]:
        """Return stage and chunk of a position (beyond the ends a chunk that does not exist)."""
        chunk, stage = divmod(position, self.num_stages)
        return (self.num_stages - 1 - stage if self.zigzag and chunk % 2 else stage), chunk

    def partner(self, action: Action) -> Action:
        """Return the receive that takes what the send `action` sends, or the other way round.

        Before the first and after the last position the result names a chunk that does not exist.
        """
        kind, step = _PARTNER[action.kind]
        stage, chunk = self.place(self.position(action.stage, action.chunk) + step)
        return Action(kind, stage, chunk, action.micro_batch)

    def neighbour(self, action: Action, step: Literal[-1, 1]) -> tuple[int, int] | None:
        """Return stage and chunk one `step` along the line; None beyond its ends."""
        position = self.position(action.stage, action.chunk) + step
        return self.place(position) if 0 <= position <= self.last else None

    def is_first(self, action: Action) -> bool:
        """Whether the action's chunk begins the line (and starts from the micro-batch)."""
        return self.position(action.stage, action.chunk) == 0

    def is_last(self, action: Action) -> bool:
        """Whether the action's chunk ends the line (and computes the loss)."""
        return self.position(action.stage, action.chunk) == self.last


@dataclass(frozen=True)
class Schedule:
    """The actions of every stage, in order: `schedule[stage]`, and the line they drive.

    Without a line, that of as many chunks as the actions name, not zigzag.
    """

    stages: tuple[tuple[Action, ...], ...]
    line: Line

    def __init__(self, stages: Sequence[Sequence[Action]], line: Line | None = None) -> None:
        if line is None:
            chunks = max((num_chunks(actions) for actions in stages), default=1)
            line = Line(num_stages=len(stages), num_chunks=chunks)
        object.__setattr__(self, "stages", tuple(tuple(actions) for actions in stages))
        object.__setattr__(self, "line", line)

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, stage: int) -> tuple[Action, ...]:
        return self.stages[stage]

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return iter(self.stages)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return any(action.kind == "W" for actions in self.stages for action in actions)

    def forward_only(self) -> Schedule:
        """Return the half that evaluation needs."""
        return Schedule(
            [
                [replace(action, paired=False) for action in actions if not action.is_backward]
                for actions in self
            ],
            self.line,
        )


def num_chunks(actions: Sequence[Action]) -> int:
    """Return how many chunks of one stage these actions drive."""
    return 1 + max((action.chunk for action in actions), default=0)


def in_units(actions: Sequence[Action]) -> Iterator[tuple[Action, ...]]:
    """Return the actions one by one, but paired forwards with their backwards."""
    at = 0
    while at < len(actions):
        pair = actions[at : at + 2]
        size = 2 if pair[0].paired and pair[-1].kind == "B" else 1
        yield tuple(pair[:size])
        at += size


def with_messages(stages: Sequence[Sequence[Action]], line: Line) -> Schedule:
    """Return the schedule of these computing actions (F, B, W) with its sends and receives.

    A result is sent as soon as it is computed, those of a pair when both are. Between two stages
    messages arrive in the order in which they were sent, so before an action takes one, it receives
    those sent earlier as well. Then nothing waits for ever unless the computing actions do.
    """
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)  # by source and target
    for actions in stages:
        for action in actions:
            send = _message(action, line)
            if send is not None:
                sent[send.stage, line.partner(send).stage].append(line.partner(send))
    taken: dict[tuple[int, int], int] = defaultdict(int)
    result = []
    for actions in stages:
        mine: list[Action] = []
        received: set[Action] = set()
        for unit in in_units(actions):
            for needed in (_needed(action, line) for action in unit):
                if needed is not None and needed not in received:
                    link = line.partner(needed).stage, needed.stage
                    until = sent[link].index(needed, taken[link]) + 1
                    mine += sent[link][taken[link] : until]
                    received.update(sent[link][taken[link] : until])
                    taken[link] = until
            mine += unit
            mine += [send for action in unit if (send := _message(action, line)) is not None]
        result.append(mine)
    return Schedule(result, line)


def _message(action: Action, line: Line) -> Action | None:
    """The send that follows a computing action, if its result goes to another stage."""
    if action.kind == "W":
        return None
    to = line.neighbour(action, 1 if action.kind == "F" else -1)
    if to is None or to[0] == action.stage:
        return None
    kind: Kind = "SEND_F" if action.kind == "F" else "SEND_B"
    return Action(kind, action.stage, action.chunk, action.micro_batch)


def _needed(action: Action, line: Line) -> Action | None:
    """The receive that a computing action waits for, if its input is another stage's."""
    if action.kind == "W":
        return None
    source = line.neighbour(action, -1 if action.kind == "F" else 1)
    if source is None or source[0] == action.stage:
        return None
    kind: Kind = "RECV_F" if action.kind == "F" else "RECV_B"
    return Action(kind, action.stage, action.chunk, action.micro_batch)
