"""A server at a real port, in a thread of this process, and ways to talk to it."""

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import uvicorn

from mcore_inference import LLM, AsyncEngine
from mcore_inference.server import bind, create_app

NAME = "tiny"


class Live:
    """The server, seen from outside, and its engine."""

    def __init__(self, port: int, engine: AsyncEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.port = port
        self.engine = engine
        self.loop = loop

    def client(self) -> openai.OpenAI:
        """The official client; close it."""
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1",
            api_key="none",
            max_retries=0,
            timeout=60,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and JSON of an answer; a body that is bytes goes out as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, body=data)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The JSON objects of an event stream that comes to its end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", path, body=json.dumps({**body, "stream": True}).encode())
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
            *parts, end = response.read().decode().split("\n\n")
        finally:
            connection.close()
        assert end == ""
        lines = [part.removeprefix("data: ") for part in parts]
        assert [f"data: {line}" for line in lines] == parts
        assert lines[-1] == "[DONE]" or "error" in json.loads(lines[-1])
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait, in the event loop, for what other threads do."""

        async def waiting() -> None:
            while not condition():
                await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(asyncio.wait_for(waiting(), 60), self.loop).result()


@contextmanager
def live(llm: LLM, **options: int) -> Iterator[Live]:
    """Serve `llm` while the context lasts; nothing may be left under way at its end."""
    bound = bind("127.0.0.1", 0)
    ready = threading.Event()
    found: list[Any] = []

    async def main() -> None:
        async with AsyncEngine(llm.engine, **options) as engine:
            app = create_app(llm, engine, name=NAME)
            server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
            found.extend((engine, asyncio.get_running_loop(), server))
            serving = asyncio.create_task(server.serve(sockets=[bound]))
            while not server.started:
                await asyncio.sleep(0.005)
            ready.set()
            await serving

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(60)
    engine, loop, server = found
    try:
        yield Live(bound.getsockname()[1], engine, loop)
        Live(0, engine, loop).wait_until(lambda: engine.num_under_way == 0)
        assert llm.engine._cache.num_slots == 0
    finally:
        server.should_exit = True
        thread.join(60)
