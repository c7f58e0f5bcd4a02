"""Bodies in, answers and event streams out, and clients that leave in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from mcore_inference.async_engine import DrainingError, Generation, GenerationError
from mcore_inference.server.errors import APIError, failure

MAX_BODY = 16 * 2**20
"""Bytes of a request's body."""

T = TypeVar("T")


async def read_body(request: Request, drain_began: asyncio.Event) -> bytes:
    """Return the body.

    Raises:
        APIError: 413, it has more than `MAX_BODY` bytes.
        ClientDisconnect: the client has left.
        DrainingError: the server shuts down, which does not wait for what is not all there.
    """
    return await _unless(drain_began.wait(), _whole_body(request), DrainingError())


async def _whole_body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise APIError(
                413, f"the body has more than {MAX_BODY} bytes", code="request_too_large"
            )
        parts.append(part)
    return b"".join(parts)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it when the client leaves.

    Raises:
        ClientDisconnect: it has left.
    """
    return await _unless(_disconnection(receive), work, ClientDisconnect())


async def _unless(
    event: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T], error: Exception
) -> T:
    """Return what `work` returns; if `event` comes first, cancel it and raise `error`."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(event)
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise error
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: one JSON object each, then `[DONE]`.

    The requests behind them are aborted when the client leaves. If they fail, an error object is
    the last event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any]], generation: Generation) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, as an ASGI application."""
        async with self._generation:
            with contextlib.suppress(ClientDisconnect, OSError):
                await unless_disconnected(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for event in self._events:
                await send(_part(_dump(event)))
            await send(_part(b"[DONE]"))
        except GenerationError as error:
            await send(_part(_dump(failure(error).body())))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _part(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True}


def _dump(event: dict[str, Any]) -> bytes:
    return json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
