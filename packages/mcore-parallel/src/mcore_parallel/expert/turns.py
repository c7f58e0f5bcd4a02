"""Several computations in turn: while messages of one are under way, another goes on.

A computation is a generator that yields where it would otherwise wait. Run in turn, each goes on
up to its next yield while what the others have started travels. Autograd follows backwards: the
operations of all of them are in one order, so that their backward passes take turns as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from mcore_parallel.recompute import Autocast

__all__ = ["Steps", "Turns", "finish", "in_turns"]

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A computation that yields where something of it is under way, and returns its result."""


def finish(steps: Steps[T]) -> T:
    """Run a computation to its end and return its result."""
    return in_turns([steps])[0]


def in_turns(parts: Sequence[Steps[T]]) -> list[T]:
    """Run computations in turn, each up to its next yield, and return their results in order.

    Those of all ranks yield at the same places, so that their messages meet.
    """
    results: dict[int, T] = {}
    while len(results) < len(parts):
        for index, part in enumerate(parts):
            if index not in results:
                try:
                    next(part)
                except StopIteration as end:
                    results[index] = end.value
    return [results[index] for index in range(len(parts))]


class Turns:
    """Lets a forward pass go on where a backward pass waits for messages, and the other way round.

    For `run_schedule`, whose paired actions are two such passes, of different micro-batches. A
    layer that exchanges tokens says where either of them would wait:

        mark = turns.mark(x)                # the exchange has been started
        turns.forward_waits()               # the other pass computes while rows travel
        rows = turns.after(mark, received)  # received: what the exchange brought

    The forward pass has a thread of its own, and only one of the two runs at a time: they change
    places where layers say so and nowhere else, so that collectives come in one order on all ranks.
    Outside of a pair nothing of this does anything. Nothing changes in any result.
    """

    def __init__(self) -> None:
        self._pair: _Pair | None = None

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run both to their ends, `forward` for the first time where `backward` first waits.

        What either raises is raised here, and the other is given up where it waits.
        """
        pair = self._pair = _Pair(forward)
        try:
            backward()
        except BaseException:
            pair.give_up()
            raise
        finally:
            self._pair = None
        pair.finish()

    def finish(self, steps: Steps[T]) -> T:
        """As the function `finish`; a forward pass waits where the computation yields."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return cast(T, end.value)
            self.forward_waits()

    def forward_waits(self) -> None:
        """Let the backward pass go on, if this is the forward pass of a pair.

        What a backward pass runs again is not: torch's random generators are then not as the
        forward pass of another micro-batch expects them.
        """
        pair = self._pair
        if pair is not None and pair.is_forward():
            pair.forward_waits()

    def backward_waits(self) -> None:
        """Let the forward pass go on, if this is within the backward pass of a pair."""
        if self._pair is not None:
            self._pair.backward_waits()

    def mark(self, x: Tensor) -> Tensor:
        """Note in the graph of `x` that an exchange has been started here; pass it to `after`."""
        return cast(Tensor, _Mark.apply(x, self))  # type: ignore[no-untyped-call]

    def after(self, mark: Tensor, received: Tensor) -> Tensor:
        """Return `received`; in its backward pass the exchange has been started at the mark.

        Autograd works from the last operation to the first: what lies before `received` and after
        the mark starts the exchange of gradients, and what lies before the mark waits for it.
        """
        return cast(Tensor, _After.apply(received, mark))  # type: ignore[no-untyped-call]


class _Pair:
    """A forward pass that runs while the backward pass, whose thread made this, stands still."""

    def __init__(self, forward: Callable[[], None]) -> None:
        self._forward = forward
        self._surroundings = _Surroundings()
        self._thread: threading.Thread | None = None
        self._forwards_turn, self._backwards_turn = threading.Semaphore(0), threading.Semaphore(0)
        self._stands = False  # the forward pass, and so the backward pass goes on
        self._is_over = self._is_given_up = False
        self._error: BaseException | None = None

    def is_forward(self) -> bool:
        return threading.current_thread() is self._thread

    def forward_waits(self) -> None:
        self._stands = True
        self._backwards_turn.release()
        self._forwards_turn.acquire()
        self._stands = False
        if self._is_given_up:
            raise _GivenUpError

    def backward_waits(self) -> None:
        if self._is_over:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paired forward", daemon=True)
            self._thread.start()
        else:
            self._forwards_turn.release()
        self._backwards_turn.acquire()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Run what is left of the forward pass."""
        if self._thread is None:
            self._forward()
            return
        self._forwards_turn.release()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """End the forward pass where it stands; if it does not (an interrupt), where it will."""
        self._is_given_up = True
        self._forwards_turn.release()
        if self._stands and self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with self._surroundings.again():
                self._forward()
        except BaseException as error:
            self._error = error
        self._is_over = True
        self._backwards_turn.release()


class _GivenUpError(BaseException):
    """The other pass of a pair failed; no handler of errors is to stop it."""


class _Surroundings:
    """What torch keeps for each thread, as it is now: autocast, the current device and stream."""

    def __init__(self) -> None:
        ready = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream() if ready else None
        self._autocast = Autocast(set() if self._stream is None else {"cuda"})

    @contextmanager
    def again(self) -> Iterator[None]:
        """Make it within the block what it was."""
        with ExitStack() as stack:
            stack.enter_context(self._autocast.again())
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            yield


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: Turns) -> Tensor:
        ctx.turns = turns
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.turns.backward_waits()
        return None, None


class _After(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, mark: Tensor) -> Tensor:
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, grad.new_empty(0)
