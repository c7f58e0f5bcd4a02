"""The one loop that runs any schedule's list of actions for this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from mcore_parallel.group import Group
from mcore_parallel.pipeline.actions import Action, partner
from mcore_parallel.pipeline.channel import Channel, Message, Sending

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
    forward_only: bool = False,
    around: Around | None = None,
) -> list[Tensor]:
    """Run this rank's actions of a schedule and return the outputs of the last stage.

    actions: one list of a schedule that `check` accepts, the one of stage `pp.rank`. stage: the
    function of each chunk (just the function when there is one); in training that of the last stage
    returns a scalar loss, whose gradient is 1. micro_batches: every stage passes as many. pp: the
    pipeline group where tensors are on the CPU or there is one stage; else a `Channel` over it,
    made once. forward_only: leave out everything that belongs to the backward pass, and record no
    graph. around: wraps every computing action, so that gradient buckets know which backward is the
    last (`GradientBuckets.around`).

    Returns the detached outputs of the last stage by micro-batch; elsewhere an empty list.
    Gradients accumulate in the parameters. Communicates over the pipeline group only; with one
    stage it needs no process group and is plain gradient accumulation.

    A stage keeps no output: once sent, only the graph behind it lives on until its backward.

    Raises:
        ValueError: the actions belong to another stage or do not fit micro-batches and chunks.
        PipelineError: something failed inside an action.
    """
    channel = pp if isinstance(pp, Channel) else Channel(pp)
    stages = list(stage) if isinstance(stage, Sequence) else [stage]
    if forward_only:
        actions = [action for action in actions if not action.is_backward]
    _check_fit(actions, len(stages), len(micro_batches), channel.group)
    run = _Run(stages, micro_batches, channel, forward_only, around or _nothing_around)
    last = {(action.kind, action.chunk): action for action in actions}
    with torch.set_grad_enabled(not forward_only):
        for action in actions:
            try:
                run.do(action, last[action.kind, action.chunk] is action)
            except Exception as error:
                rank = channel.group.ranks[channel.group.rank]
                raise PipelineError(rank, action, f"{type(error).__name__}: {error}") from error
        channel.flush()
    return [run.results[i] for i in sorted(run.results)]


def _nothing_around(action: Action, last: bool) -> AbstractContextManager[object]:
    return nullcontext()


def _check_fit(actions: Sequence[Action], chunks: int, count: int, pp: Group) -> None:
    for action in actions:
        if action.stage != pp.rank:
            raise ValueError(f"{action} is for stage {action.stage}, this is stage {pp.rank}")
        if action.kind == "W":
            raise ValueError(
                f"stage {action.stage}, {action}: this executor runs whole backwards; use "
                f"a schedule without separate weight gradients (1f1b, gpipe)"
            )
    forwards = {(action.chunk, action.micro_batch) for action in actions if action.kind == "F"}
    if forwards != {(chunk, i) for chunk in range(chunks) for i in range(count)}:
        raise ValueError(
            f"the schedule has {len({i for _, i in forwards})} micro-batches and "
            f"{len({chunk for chunk, _ in forwards})} chunks on stage {pp.rank}, but {count} "
            f"micro-batches and {chunks} stage functions were given"
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


class _Run(Generic[M]):
    """What is under way on one stage; keys are (chunk, micro-batch)."""

    def __init__(
        self,
        stages: Sequence[StageFunction[M]],
        micro_batches: Sequence[M],
        channel: Channel,
        forward_only: bool,
        around: Around,
    ) -> None:
        self.stages = stages
        self.micro_batches = micro_batches
        self.channel = channel
        self.forward_only = forward_only
        self.around = around
        self.arriving: dict[Action, Message] = {}
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.to_send: dict[Action, Tensor] = {}
        self.sent: dict[Action, Sending] = {}
        self.graphs: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self.results: dict[int, Tensor] = {}

    def do(self, action: Action, last: bool) -> None:
        if action.is_send:
            peer = partner(action, self.size).stage
            sending = self.channel.send(self.to_send.pop(action), peer)
            if action.kind == "SEND_F" and not self.forward_only:
                self.sent[action] = sending
        elif action.is_receive:
            self.arriving[action] = self.channel.receive(partner(action, self.size).stage)
        else:
            with self.around(action, last):
                (self.forward if action.kind == "F" else self.backward)(action)

    @property
    def size(self) -> int:
        return self.channel.group.size

    def is_first(self, action: Action) -> bool:
        return action.stage == 0 and action.chunk == 0

    def is_last(self, action: Action) -> bool:
        return action.stage == self.size - 1 and action.chunk == len(self.stages) - 1

    def received(self, kind: Literal["RECV_F", "RECV_B"], action: Action) -> Tensor:
        return self.arriving.pop(replace(action, kind=kind)).wait()

    def forward(self, action: Action) -> None:
        key = action.chunk, action.micro_batch
        hidden = None
        if not self.is_first(action):
            hidden = self.received("RECV_F", action)
            if not self.forward_only:
                self.inputs[key] = hidden.requires_grad_(hidden.is_floating_point())
        output = self.stages[action.chunk](self.micro_batches[action.micro_batch], hidden)
        if self.is_last(action):
            if not self.forward_only and output.numel() != 1:
                raise ValueError(
                    f"the last stage returns a scalar loss, not a tensor of shape "
                    f"{list(output.shape)}"
                )
            self.results[action.micro_batch] = output.detach()
        else:
            self.to_send[replace(action, kind="SEND_F")] = output.detach()
            if output.requires_grad:
                output = _Ending.apply(output, self.gradients, key)  # type: ignore[no-untyped-call]
        if output.requires_grad:
            self.graphs[key] = output

    def backward(self, action: Action) -> None:
        key = action.chunk, action.micro_batch
        if not self.is_last(action):
            self.gradients[key] = self.received("RECV_B", action)
            # The answer has come back, so the activations have left: let go of them.
            self.sent.pop(replace(action, kind="SEND_F")).wait()
        graph = self.graphs.pop(key, None)
        if graph is not None:  # None: nothing here or before is trained
            torch.autograd.backward(graph)
        self.gradients.pop(key, None)
        if not self.is_first(action):
            hidden = self.inputs.pop(key)
            back = hidden.grad if hidden.grad is not None else torch.zeros_like(hidden)
            self.to_send[replace(action, kind="SEND_B")] = back
