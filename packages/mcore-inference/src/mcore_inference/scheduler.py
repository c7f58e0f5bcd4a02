"""Which requests run next."""

from __future__ import annotations

from collections import deque

from mcore_inference.request import Request


class Scheduler:
    """First come, first served: a waiting request joins the running ones when there is room.

    At most `max_sequences` run at a time. A request that joins brings its whole prompt into the
    next pass, which holds at most `max_batch_tokens` tokens; a longer prompt runs alone.

    Raises:
        ValueError: a limit is not positive.
    """

    def __init__(self, *, max_sequences: int, max_batch_tokens: int) -> None:
        for name, value in (
            ("max_sequences", max_sequences),
            ("max_batch_tokens", max_batch_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.max_sequences = max_sequences
        self.max_batch_tokens = max_batch_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def size(self) -> int:
        """Requests that are waiting or running."""
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Move waiting requests to the running ones, as many as have room; return them."""
        admitted: list[Request] = []
        tokens = len(self.running)  # one new token of each
        while self.waiting and len(self.running) < self.max_sequences:
            tokens += len(self.waiting[0].prompt)
            if self.running and tokens > self.max_batch_tokens:
                break
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is; one that is not here is passed over."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
