"""The one loop that runs any schedule's list of actions for this rank."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from mcore_parallel.expert.turns import Turns
from mcore_parallel.group import Group
from mcore_parallel.pipeline.actions import Action, Line, in_units
from mcore_parallel.pipeline.channel import Channel, Message, Sending
from mcore_parallel.pipeline.inbox import Inbox, LostError, lost
from mcore_parallel.pipeline.watch import Watch
from mcore_parallel.pipeline.weights import DeferredGradients, Pending

M = TypeVar("M")
StageFunction: TypeAlias = Callable[[M, Tensor | None], Tensor]
"""(micro-batch, activations of the stage before or None) -> activations, or the loss at the end."""
Around: TypeAlias = Callable[[Action, bool], AbstractContextManager[object]]
"""(action, whether it is the chunk's last of its kind) -> context in which it computes."""


class PipelineError(RuntimeError):
    """A stage failed. `rank` (of torch.distributed) and `action` say where, `reason` says why."""

    def __init__(self, rank: int, action: Action, reason: str) -> None:
        super().__init__(rank, action, reason)  # all arguments: so that it can be pickled
        self.rank = rank
        self.action = action
        self.reason = reason

    def __str__(self) -> str:
        return f"rank {self.rank}, pipeline stage {self.action.stage}, {self.action}: {self.reason}"


def run_schedule(
    actions: Sequence[Action],
    stage: StageFunction[M] | Sequence[StageFunction[M]],
    micro_batches: Sequence[M],
    pp: Group | Channel,
    *,
    line: Line | None = None,
    forward_only: bool = False,
    around: Around | None = None,
    weight_gradients: DeferredGradients | None = None,
    turns: Turns | None = None,
) -> list[Tensor]:
    """Run this rank's actions of a schedule and return the outputs of the last chunk.

    actions: one list of a schedule that `check` accepts, the one of stage `pp.rank`. stage: the
    function of each chunk (just the function when there is one); in training that of the last chunk
    returns a scalar loss, whose gradient is 1. micro_batches: every stage passes as many. pp: the
    pipeline group where tensors are on the CPU or there is one stage; else a `Channel` over it,
    made once. line: `schedule.line`; needed where it is zigzag. forward_only: leave out everything
    that belongs to the backward pass, and record no graph. around: wraps every computing action, so
    that gradient buckets know which backward is the last (`GradientBuckets.around`).
    weight_gradients: of the parameters of all chunks; needed when the schedule has W actions.
    turns: what the layers of the stage take turns by; needed when the schedule has pairs. The
    forward of a pair then runs in a thread of its own, never at the same time as the backward.

    Returns the detached outputs of the last chunk by micro-batch; on stages without it an empty
    list. Gradients accumulate in the parameters. Communicates over the pipeline group only; with
    one stage it needs no process group and is plain gradient accumulation. Messages are received in
    the background and sent without waiting.

    A stage keeps no output: once sent, only the graph behind it lives on until its backward.

    Raises:
        ValueError: the actions belong to another stage or do not fit micro-batches and chunks.
        PipelineError: something failed inside an action; or a message did not come within
            `Channel.timeout`, and then the reason names the stage that is in the way and its
            action; or a stage is gone. The connections between the stages are closed, so that all
            of them raise; the group cannot be used again.
    """
    channel = pp if isinstance(pp, Channel) else Channel(pp)
    stages = list(stage) if isinstance(stage, Sequence) else [stage]
    line = line or Line(num_stages=channel.group.size, num_chunks=len(stages))
    if forward_only:
        actions = [action for action in actions if not action.is_backward]
    _check_fit(actions, line, len(stages), len(micro_batches), channel.group)
    if weight_gradients is None and any(action.kind == "W" for action in actions):
        raise ValueError(
            "the schedule computes weight gradients in actions of their own: pass "
            "weight_gradients=DeferredGradients(parameters), or take a schedule without W actions"
        )
    if turns is None and not forward_only and any(action.paired for action in actions):
        raise ValueError(
            "the schedule pairs forwards with backwards: pass turns=Turns() that the layers were "
            "given, or take a schedule without pairs"
        )
    channel.runs += 1
    last = {(action.kind, action.chunk): action for action in actions}
    inbox = Inbox(channel, actions, line)
    try:
        with Watch(channel) as watch, torch.set_grad_enabled(not forward_only):
            run = _Run(
                stages=stages,
                micro_batches=micro_batches,
                channel=channel,
                line=line,
                inbox=inbox,
                watch=watch,
                forward_only=forward_only,
                around=around or _nothing_around,
                weights=weight_gradients,
            )
            for unit in in_units(actions):
                parts = [
                    partial(run.do, action, last[action.kind, action.chunk] is action)
                    for action in unit
                ]
                if turns is not None and len(parts) == 2:
                    turns.run(*parts)
                    continue
                for part in parts:
                    part()
            for action in list(run.sent):
                with run.guarded(action, line.partner(action).stage):
                    run.has_left(action)
            channel.flush()
    except BaseException:
        inbox.close()
        channel.abandon()
        raise
    return [run.results[i] for i in sorted(run.results)]


def _nothing_around(action: Action, last: bool) -> AbstractContextManager[object]:
    return nullcontext()


def _check_fit(actions: Sequence[Action], line: Line, chunks: int, count: int, pp: Group) -> None:
    for action in actions:
        if action.stage != pp.rank:
            raise ValueError(f"{action} is for stage {action.stage}, this is stage {pp.rank}")
    forwards = {(action.chunk, action.micro_batch) for action in actions if action.kind == "F"}
    if forwards != {(chunk, i) for chunk in range(chunks) for i in range(count)}:
        raise ValueError(
            f"the schedule has {len({i for _, i in forwards})} micro-batches and "
            f"{len({chunk for chunk, _ in forwards})} chunks on stage {pp.rank}, but {count} "
            f"micro-batches and {chunks} stage functions were given"
        )
    if (line.num_stages, line.num_chunks) != (pp.size, chunks):
        raise ValueError(
            f"the line has {line.num_stages} stages of {line.num_chunks} chunks, but there are "
            f"{pp.size} of {chunks}"
        )


class _Ending(torch.autograd.Function):
    """A scalar that ends a stage's graph; its backward is given the output's gradient by then.

    It keeps the graph, and with it what backward needs, but not the output. (Passing the gradient
    to `torch.autograd.backward` would do too, but torch imports sympy to check its shape.)
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradients: dict[Any, Tensor], key: Any) -> Tensor:
        ctx.gradients, ctx.key = gradients, key
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradients.pop(ctx.key), None, None


@contextmanager
def _as_faults() -> Iterator[None]:
    """Turn torch's errors about a transfer into `queue.Empty` (too late) and `LostError`."""
    try:
        yield
    except RuntimeError as error:
        if "timed out" in str(error).lower():
            raise queue.Empty from error
        raise lost(error) from error


@dataclass(kw_only=True, eq=False)
class _Run(Generic[M]):
    """What is under way on one stage; keys are (chunk, micro-batch) or an action."""

    stages: Sequence[StageFunction[M]]
    micro_batches: Sequence[M]
    channel: Channel
    line: Line
    inbox: Inbox
    watch: Watch
    forward_only: bool
    around: Around
    weights: DeferredGradients | None
    arriving: dict[Action, Message] = field(default_factory=dict)
    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    to_send: dict[Action, Tensor] = field(default_factory=dict)
    sent: dict[Action, Sending] = field(default_factory=dict)
    graphs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    pending: dict[tuple[int, int], Pending] = field(default_factory=dict)
    results: dict[int, Tensor] = field(default_factory=dict)

    @contextmanager
    def guarded(self, action: Action, waits_for: int | None) -> Iterator[None]:
        """Within the block the stage is at `action`; whatever goes wrong names it."""
        self.watch.doing(action, waits_for)
        try:
            yield
        except PipelineError:  # it named the message that this action was waiting for
            raise
        except Exception as error:
            rank = self.channel.group.ranks[self.channel.group.rank]
            raise PipelineError(rank, action, self.reason(action, error)) from error

    def reason(self, action: Action, error: Exception) -> str:
        """Say what went wrong, and tell the other stages before they see this one go."""
        if isinstance(error, queue.Empty):
            fault = self.watch.who_is_late(self.line.partner(action).stage)
            reason = f"timed out waiting {self.channel.timeout.total_seconds():g} s: {fault}"
        elif isinstance(error, LostError):
            fault = self.watch.who_is_gone(self.line.partner(action).stage)
            reason = f"connection closed: {fault}"
        else:
            reason = f"{type(error).__name__}: {error}"
            fault = f"{self.watch.name(action.stage)} failed in {action}: {reason}"
        self.watch.failed(fault)
        return reason

    def do(self, action: Action, last: bool) -> None:
        """Carry out one action."""
        waits_for = self.line.partner(action).stage if action.is_receive else None
        with self.guarded(action, waits_for):
            self._do(action, last)

    def _do(self, action: Action, last: bool) -> None:
        if action.is_send:
            peer = self.line.partner(action).stage
            try:
                self.sent[action] = self.channel.send(self.to_send.pop(action), peer)
            except RuntimeError as error:
                raise lost(error) from error
        elif action.is_receive:
            peer = self.line.partner(action).stage
            timeout = self.channel.timeout.total_seconds()
            self.arriving[action] = self.inbox.take(peer, timeout)
        else:
            with self.around(action, last):
                {"F": self.forward, "B": self.backward, "W": self.weight}[action.kind](action)

    def has_left(self, send: Action) -> None:
        """Wait for a send, and let go of what was sent."""
        with _as_faults():
            self.sent.pop(send).wait(self.channel.timeout)

    def received(self, kind: Literal["RECV_F", "RECV_B"], action: Action) -> Tensor:
        """Return what a receive brings: its sender may stop or die half-way through."""
        receive = replace(action, kind=kind)
        message = self.arriving.pop(receive)
        with self.guarded(receive, self.line.partner(receive).stage), _as_faults():
            tensor = message.wait(self.channel.timeout)
        self.watch.doing(action)
        return tensor

    def hand_on(self, kind: Literal["SEND_F", "SEND_B"], action: Action, tensor: Tensor) -> None:
        """Leave a result for its SEND action, or for the neighbouring chunk when that is here."""
        send = replace(action, kind=kind)
        receive = self.line.partner(send)
        if receive.stage == action.stage:
            self.arriving[receive] = Message(tensor, None)
        else:
            self.to_send[send] = tensor

    def forward(self, action: Action) -> None:
        key = action.chunk, action.micro_batch
        hidden = None
        if not self.line.is_first(action):
            hidden = self.received("RECV_F", action)
            if not self.forward_only:
                self.inputs[key] = hidden.requires_grad_(hidden.is_floating_point())
        output = self.stages[action.chunk](self.micro_batches[action.micro_batch], hidden)
        if self.line.is_last(action):
            if not self.forward_only and output.numel() != 1:
                raise ValueError(
                    f"the last stage returns a scalar loss, not a tensor of shape "
                    f"{list(output.shape)}"
                )
            self.results[action.micro_batch] = output.detach()
        else:
            self.hand_on("SEND_F", action, output.detach())
            if output.requires_grad:
                output = _Ending.apply(output, self.gradients, key)  # type: ignore[no-untyped-call]
        if output.requires_grad:
            self.graphs[key] = output

    def backward(self, action: Action) -> None:
        key = action.chunk, action.micro_batch
        if not self.line.is_last(action):
            self.gradients[key] = self.received("RECV_B", action)
            # The answer has come back, so the activations have left: let go of them.
            sent = replace(action, kind="SEND_F")
            if sent in self.sent:
                with self.guarded(sent, self.line.partner(sent).stage):
                    self.has_left(sent)
                self.watch.doing(action)
        graph = self.graphs.pop(key, None)
        if graph is not None:  # None: nothing here or before is trained
            with self.collecting(key):
                torch.autograd.backward(graph)
        self.gradients.pop(key, None)
        if not self.line.is_first(action):
            hidden = self.inputs.pop(key)
            back = hidden.grad if hidden.grad is not None else torch.zeros_like(hidden)
            self.hand_on("SEND_B", action, back)

    @contextmanager
    def collecting(self, key: tuple[int, int]) -> Iterator[None]:
        """Where W actions follow, keep for them what the backward pass leaves to do."""
        if self.weights is None:
            yield
            return
        with self.weights.collect() as self.pending[key]:
            yield

    def weight(self, action: Action) -> None:
        pending = self.pending.pop((action.chunk, action.micro_batch), None)
        if pending is not None:
            DeferredGradients.compute(pending)
