"""The server as a process: bind, announce, answer, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from mcore_inference.async_engine import AsyncEngine
from mcore_inference.llm import LLM
from mcore_inference.server.app import create_app

_LAST_WORDS = 2  # seconds, at least, for clients to take the end of their answers
_BACKLOG = 2048
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; port 0 takes a free one.

    Whoever connects before the server answers waits for it.

    Raises:
        OSError: the address cannot be had, with the address.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, port))
            bound.listen(_BACKLOG)
        except BaseException:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        raise OSError(f"cannot listen at {host} port {port}: {error}") from None
    return bound


def address(bound: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    llm: LLM,
    bound: socket.socket,
    *,
    name: str,
    max_waiting: int = 1024,
    drain_timeout: float = 30.0,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> int:
    """Answer requests until SIGTERM or SIGINT; return the exit status of the process.

    The first signal lets requests under way finish, while others get 503; then 0 is returned. A
    second one, or `drain_timeout` seconds, ends them; then 1 is returned. Call it in the main
    thread.

    Args:
        llm: the model; on this process alone.
        bound: where to listen.
        name: what clients call the model.
        max_waiting: how many requests may wait for their turn; more get 429.
        drain_timeout: seconds.
        say: is given the lines for the user: that it is ready, and how it ends.
    """
    return asyncio.run(
        _serve(llm, bound, name=name, max_waiting=max_waiting, timeout=drain_timeout, say=say)
    )


class _Server(uvicorn.Server):
    """Leaves signals to us: what uvicorn makes of them closes the door on those under way."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.ready.set()


class _Answers:
    """The application. `cut` says whether the end of the server has cut off an answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.cut = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except asyncio.CancelledError:  # no fault, as which uvicorn would log it
            self.cut = True


async def _serve(
    llm: LLM,
    bound: socket.socket,
    *,
    name: str,
    max_waiting: int,
    timeout: float,
    say: Callable[[str], None],
) -> int:
    signals = asyncio.Queue[signal.Signals]()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, signals.put_nowait, number)
    async with AsyncEngine(llm.engine, max_waiting=max_waiting) as engine:
        app = _Answers(create_app(llm, engine, name=name))
        config = uvicorn.Config(app, lifespan="off", access_log=False, log_config=None)
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        await _first(serving, server.ready.wait())
        say(f"mcore-inference: serving {name} at {address(bound)}")
        await _first(serving, signals.get())
        say(f"mcore-inference: draining, requests under way: {engine.num_under_way}")
        began = loop.time()
        await _first(engine.drain(), signals.get(), timeout=timeout)
        left = engine.num_under_way
        await engine.close()
        # What is generated may still be on its way to slow clients.
        rest = 0 if left else timeout - (loop.time() - began)
        config.timeout_graceful_shutdown = max(math.ceil(rest), _LAST_WORDS)
        server.should_exit = True
        await _first(serving, signals.get())
        ended = serving.done()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        cut = await _hang_up(server.server_state) or app.cut or not ended
    if left:
        print(f"mcore-inference: requests not finished: {left}", file=sys.stderr)
    elif cut:
        print("mcore-inference: not all answers were read to their end in time", file=sys.stderr)
    return int(left > 0 or cut)


async def _hang_up(state: ServerState) -> bool:
    """End the answers and connections that are left; return whether there were any."""
    tasks, connections = list(state.tasks), list(state.connections)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_LAST_WORDS)
    for connection in connections:  # one may hold an answer that was sent in one piece
        connection.transport.abort()
    await asyncio.sleep(0)  # the transports close in the loop's next round
    return bool(tasks or connections)


async def _first(
    *events: Coroutine[Any, Any, Any] | asyncio.Task[Any], timeout: float | None = None
) -> None:
    """Wait for the first of several events, or the time; raise the error of one that failed."""
    tasks = [asyncio.ensure_future(event) for event in events]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        mine = [task for task, event in zip(tasks, events, strict=True) if task is not event]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)
