"""The engine behind an event loop: a thread steps it, coroutines wait for what it gives."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from mcore_inference.engine import Engine
from mcore_inference.request import FinishReason, Request

_log = logging.getLogger(__name__)


class QueueFullError(RuntimeError):
    """More requests wait than may."""


class DrainingError(RuntimeError):
    """No request is taken any more: those under way are being finished."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down: it takes no more requests")


class GenerationError(RuntimeError):
    """A step of the engine failed with this request under way."""


class EngineClosedError(GenerationError):
    """The engine was closed with this request under way."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What a request has more than when the last chunk was made.

    Attributes:
        index: which request of its generation.
        text: the text, if it is followed (see `Request.text`); "" otherwise.
        tokens: the places in `Request.tokens` (and in the lists of log-probabilities) of the tokens
            whose text is complete with this chunk.
        finish_reason: None except in the last chunk.
    """

    index: int
    text: str
    tokens: range
    finish_reason: FinishReason | None


class Generation:
    """Requests that were submitted together, and what comes of them.

    A context manager: leaving it aborts what is not finished, whyever it is left.
    """

    def __init__(self, engine: AsyncEngine, requests: Sequence[Request], *, stream: bool) -> None:
        self.requests = tuple(requests)
        self.stream = stream
        self.results: asyncio.Queue[Chunk | GenerationError] = asyncio.Queue()
        self._engine = engine
        self._unfinished = len(self.requests)

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Give the chunks as they come, each request's last with its `finish_reason`.

        Raises:
            GenerationError: one of the requests failed.
        """
        while self._unfinished:
            result = await self.results.get()
            if isinstance(result, GenerationError):
                raise result
            self._unfinished -= result.finish_reason is not None
            yield result

    async def finish(self) -> None:
        """Wait for all requests; raises as `chunks` does."""
        async for _ in self.chunks():
            pass

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._unfinished:
            self._engine.abort(self.requests)


@dataclass(kw_only=True, eq=False)
class _Cursor:
    """How much of a request has been handed on; belongs to the thread of the engine."""

    request: Request
    generation: Generation
    index: int
    num_characters: int = 0
    num_tokens: int = 0

    def chunk(self) -> Chunk | None:
        """Return what is new, if it is to be handed on now."""
        request, stream = self.request, self.request.text
        if request.finish_reason is None and not self.generation.stream:
            return None
        text, stop = "", len(request.tokens)
        if stream is not None:
            text = stream.since(self.num_characters)
            if request.finish_reason is None:
                ends = stream.ends
                stop = self.num_tokens
                while stop < len(ends) and ends[stop] <= stream.visible:
                    stop += 1
        fresh = text or (stream is None and stop > self.num_tokens)
        if request.finish_reason is None and not fresh:
            return None
        tokens = range(self.num_tokens, stop)
        self.num_characters += len(text)
        self.num_tokens = stop
        return Chunk(
            index=self.index, text=text, tokens=tokens, finish_reason=request.finish_reason
        )


_Result = Chunk | GenerationError | None  # None: aborted


class AsyncEngine:
    """Takes requests from coroutines of one event loop, while a thread of its own steps an engine.

    An async context manager; the engine belongs to it meanwhile. Requests join and leave between
    steps. A step that fails fails the requests that took part, and no others.

    Args:
        engine: of a model on this process alone.
        max_waiting: how many requests may wait besides the `max_sequences` that run.

    Raises:
        ValueError: `max_waiting` is negative.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 1024) -> None:
        if max_waiting < 0:
            raise ValueError(f"max_waiting={max_waiting} must be at least 0")
        self.engine = engine
        self.capacity = engine.max_sequences + max_waiting
        self.draining = False
        # Of the event loop:
        self.drain_began = asyncio.Event()
        self._under_way: set[Request] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        # Between the two, under the condition:
        self._changed = threading.Condition()
        self._arrived: list[_Cursor] = []
        self._dropped: list[Request] = []
        self._closing = False
        # Of the thread:
        self._cursors: dict[Request, _Cursor] = {}
        self._thread = threading.Thread(target=self._run, name="mcore-engine", daemon=True)

    async def __aenter__(self) -> AsyncEngine:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def num_under_way(self) -> int:
        """Requests that were submitted and are neither finished nor dropped."""
        return len(self._under_way)

    def submit(self, requests: Sequence[Request], *, stream: bool = False) -> Generation:
        """Let requests take part from the next step that has room for them.

        Args:
            requests: all of them are taken, or none.
            stream: whether chunks are wanted while the text grows, or the last ones only.

        Raises:
            ValueError: as `Engine.add` does.
            QueueFullError: too many are under way.
            DrainingError: no request is taken any more.
        """
        if self.draining or self._closing:
            raise DrainingError
        count, under_way = len(requests), self.num_under_way
        if under_way + count > self.capacity:
            raise QueueFullError(
                f"{count} more requests do not fit: {under_way} of at most {self.capacity} are "
                f"under way; try again later"
            )
        self.engine.check_each(requests)
        generation = Generation(self, requests, stream=stream)
        cursors = [
            _Cursor(request=request, generation=generation, index=index)
            for index, request in enumerate(requests)
        ]
        self._under_way.update(requests)
        self._idle.clear()
        with self._changed:
            self._arrived += cursors
            self._changed.notify()
        return generation

    def abort(self, requests: Sequence[Request]) -> None:
        """Drop requests and their caches before the next step; those not here are passed over."""
        with self._changed:
            self._dropped += requests
            self._changed.notify()

    async def drain(self) -> None:
        """Take no more requests, and wait until those under way are finished."""
        self.draining = True
        self.drain_began.set()
        await self._idle.wait()

    async def close(self) -> None:
        """End the thread after the step it is in; requests under way fail."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        """The thread: take what arrived, step, hand on what came of it."""
        try:
            while self._take():
                if self._cursors:
                    self._step()
        finally:
            with self._changed:
                self._closing = self.draining = True
                self._cursors |= {cursor.request: cursor for cursor in self._arrived}
            requests = list(self._cursors)
            self.engine.abort(requests)
            self._fail(requests, EngineClosedError("the server has shut down"))

    def _take(self) -> bool:
        """Take what the event loop has put down, waiting if there is nothing to do."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._arrived or self._dropped or self._cursors
            )
            arrived, self._arrived = self._arrived, []
            dropped, self._dropped = self._dropped, []
        for cursor in arrived:
            self._cursors[cursor.request] = cursor
            self.engine.add(cursor.request)
        self.engine.abort(dropped)
        gone = [self._cursors.pop(request) for request in dropped if request in self._cursors]
        self._hand_on([(cursor, None) for cursor in gone])
        return not self._closing

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception as error:  # whatever it is, those who wait must hear of it
            _log.exception("a step of the engine failed")
            waiting = set(self.engine.waiting)
            failed = [r for r in self._cursors if r not in waiting and r.finish_reason is None]
            reason = " ".join(str(error).split()) or "no reason given"
            self._fail(failed, GenerationError(f"{type(error).__name__}: {reason}"))
        chunks = [(cursor, cursor.chunk()) for cursor in self._cursors.values()]
        self._hand_on([(cursor, chunk) for cursor, chunk in chunks if chunk is not None])
        for cursor, chunk in chunks:
            if chunk is not None and chunk.finish_reason is not None:
                del self._cursors[cursor.request]

    def _fail(self, requests: Sequence[Request], error: GenerationError) -> None:
        self._hand_on([(self._cursors.pop(request), error) for request in requests])

    def _hand_on(self, results: list[tuple[_Cursor, _Result]]) -> None:
        if results:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._deliver, results)

    def _deliver(self, results: list[tuple[_Cursor, _Result]]) -> None:
        """In the event loop: put results where they are waited for."""
        for cursor, result in results:
            if result is not None:
                cursor.generation.results.put_nowait(result)
            if not isinstance(result, Chunk) or result.finish_reason is not None:
                self._under_way.discard(cursor.request)
        if not self._under_way:
            self._idle.set()
