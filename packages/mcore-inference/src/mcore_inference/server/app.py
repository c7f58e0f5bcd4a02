"""The routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mcore_inference.async_engine import (
    AsyncEngine,
    DrainingError,
    GenerationError,
    QueueFullError,
)
from mcore_inference.llm import LLM
from mcore_inference.server.answers import Answer, ChatAnswer, CompletionAnswer, events
from mcore_inference.server.errors import APIError, failure
from mcore_inference.server.protocol import B, ChatBody, CompletionBody, parse
from mcore_inference.server.service import Plan, Service
from mcore_inference.server.transport import EventStream, read_body, unless_disconnected


def create_app(llm: LLM, engine: AsyncEngine, *, name: str) -> FastAPI:
    """Return the application that answers OpenAI's interface for completions with a model.

    Args:
        llm: the model, its tokenizer and its chat template.
        engine: its engine; it must be running, in the event loop that runs the application.
        name: what clients call the model.
    """
    # No pages of documentation: they would load scripts from elsewhere.
    app = FastAPI(title="mcore-inference", openapi_url=None)
    service = Service(llm, engine, name)
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "mcore"}
    card["max_model_len"] = service.max_length

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        if engine.draining:
            return JSONResponse({"status": "draining"}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        service.check_model(model)
        return JSONResponse(card)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _complete(
            request, service, CompletionBody, service.plan_completion, CompletionAnswer
        )

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _complete(request, service, ChatBody, service.plan_chat, ChatAnswer)

    app.add_exception_handler(APIError, _refuse)
    app.add_exception_handler(HTTPException, _refuse)
    app.add_exception_handler(DrainingError, _draining)
    app.add_exception_handler(ClientDisconnect, _nobody)
    app.add_exception_handler(Exception, _fault)
    return app


async def _complete(
    request: Request,
    service: Service,
    kind: type[B],
    plan: Callable[[B], Plan],
    answer: Callable[..., Answer],
) -> Response:
    """Answer one request of either kind."""
    engine = service.engine
    data = await read_body(request, engine.drain_began)

    def read() -> tuple[B, Plan]:
        body = parse(kind, data)
        service.check_model(body.model)
        return body, plan(body)

    # In another thread: a long body, and the tokens of a long text, take a while.
    body, planned = await asyncio.to_thread(read)
    try:
        generation = engine.submit(planned.requests, stream=bool(body.stream))
    except QueueFullError as error:
        raise APIError(429, str(error), code="queue_full") from None
    written = answer(planned, service.names, body)
    if body.stream:
        return EventStream(events(written, generation), generation)
    async with generation:
        try:
            await unless_disconnected(request.receive, generation.finish())
        except GenerationError as error:
            raise failure(error) from None
    return JSONResponse(written.whole())


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # of the router
        what = f"{request.method} {request.url.path}"
        error = APIError(error.status_code, f"{what}: {error.detail.lower()}", code="no_such_route")
    assert isinstance(error, APIError)
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _draining(request: Request, error: Exception) -> Response:
    return await _refuse(request, APIError(503, str(error), code="draining"))


async def _fault(request: Request, error: Exception) -> Response:
    """A fault of ours: the server logs it, and says no more of it."""
    return JSONResponse(APIError(500, "internal error", code="internal").body(), status_code=500)


async def _nobody(request: Request, error: Exception) -> Response:
    """Nobody reads this."""
    return Response(status_code=499)


__all__ = ["create_app"]
