"""Receiving in the background, so that a message is here when its action comes."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from mcore_parallel.pipeline.actions import Action, Line
from mcore_parallel.pipeline.channel import Channel, Message

_AHEAD = 2  # messages of a stage that may be here, or on their way, before they are taken


class LostError(RuntimeError):
    """A message cannot come any more: the connection to its sender is broken."""


def lost(error: Exception) -> Exception:
    """Return `error` as what it means for this stage: `LostError` where gloo lost a connection."""
    # NCCL's errors are of a type of their own, and mostly about this rank.
    if not isinstance(error, RuntimeError) or isinstance(error, dist.DistBackendError):
        return error
    found = LostError(f"{type(error).__name__}: {error}")
    found.__cause__ = error
    return found


class Inbox:
    """The messages of one run, received in order by one thread for each stage that sends any.

    A header says how much memory the tensor behind it needs, so somebody has to wait for headers
    while this stage computes. On CUDA a thread receives on a stream of its own: on the stream that
    computes, a transfer would wait for all work queued there.

    The threads end with the last message of the run, and after a fault with `Channel.abandon`.
    """

    def __init__(self, channel: Channel, actions: Sequence[Action], line: Line) -> None:
        self._channel = channel
        self._closed = False
        expected: dict[int, int] = defaultdict(int)
        for action in actions:
            if action.is_receive:
                expected[line.partner(action).stage] += 1
        self._room = {stage: threading.Semaphore(_AHEAD) for stage in expected}
        self._here: dict[int, queue.SimpleQueue[Message | Exception]] = {
            stage: queue.SimpleQueue() for stage in expected
        }
        for stage, count in expected.items():
            name = f"stage {channel.group.rank} receives from {stage}"
            threading.Thread(
                target=self._receive, args=(stage, count), name=name, daemon=True
            ).start()

    def take(self, stage: int, timeout: float) -> Message:
        """Return the next message from `stage`.

        Raises:
            queue.Empty: it did not come within `timeout` seconds.
            LostError: it will not come.
        """
        found = self._here[stage].get(timeout=timeout)
        self._room[stage].release()
        if isinstance(found, Exception):
            raise lost(found)
        return found

    def close(self) -> None:
        """Let threads end that are not waiting for a message."""
        self._closed = True
        for room in self._room.values():
            room.release()

    def _receive(self, stage: int, count: int) -> None:
        try:
            with self._stream():
                for _ in range(count):
                    self._room[stage].acquire()
                    if self._closed:
                        return
                    self._here[stage].put(self._channel.receive(stage))
        except Exception as error:  # raised where the message is taken
            self._here[stage].put(error)

    def _stream(self) -> AbstractContextManager[object]:
        if self._channel.device.type != "cuda":
            return nullcontext()
        stream = torch.cuda.Stream(self._channel.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(stream)
