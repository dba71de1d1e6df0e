"""The gateway on HTTP: routes, keys, errors in each dialect's form, and what was delivered.

An answer counts as delivered once its response is written to a client that is still there. A client
that left and comes back (`Idempotency-Key`, or its SDK's retry count) gets the answer that it
missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import uvicorn
import xxhash
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from leeway.errors import ConfigError, DataError, EngineError, InfrastructureError, LeewayError
from leeway.trajectory import Task
from rollout_service.gateway import (
    anthropic_messages,
    openai_chat,
    openai_completions,
    openai_responses,
)
from rollout_service.gateway.answering import Gateway
from rollout_service.gateway.requests import Ask, Completion, OverBudgetError, SessionError
from rollout_service.gateway.sessions import Call, Session

# How long the last responses may take once the server is told to end.
_SHUTDOWN_SECONDS = 1

Endpoint = Callable[[Request], Awaitable[Response]]


class Offers(Protocol):
    """Where programs that run elsewhere get their trajectories from."""

    def take(self) -> tuple[Session, Task, int] | None:
        """A session that waits for a program, its task, and its index in the group."""
        ...


def build_app(gateway: Gateway, model: str, offers: Offers, token: str | None) -> FastAPI:
    """Args:
    model: The name under which /v1/models lists the policy.
    token: What /sessions asks for; with None anyone who reaches the server may open one.
    """
    app = FastAPI(title="Leeway gateway", docs_url=None, redoc_url=None)

    def dialect(path: str) -> Callable[[Endpoint], None]:
        """A plain route: a dialect reads its requests itself, and FastAPI's reading takes time."""
        return lambda endpoint: app.add_route(path, endpoint, methods=["POST"])

    @dialect("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        session, body = await _begin(gateway, request)
        ask = openai_chat.parse(body)
        usage = (body.get("stream_options") or {}).get("include_usage", False)
        return await _respond(
            request,
            ask,
            session,
            lambda completion: openai_chat.render(completion, ask, gateway.form),
            lambda call: openai_chat.events(call, ask, gateway.form, include_usage=usage),
        )

    @dialect("/v1/completions")
    async def completions(request: Request) -> Response:
        session, body = await _begin(gateway, request)
        ask = openai_completions.parse(body)
        return await _respond(
            request,
            ask,
            session,
            lambda completion: openai_completions.render(completion, ask, gateway.form),
            lambda call: openai_completions.events(call, ask),
        )

    @dialect("/v1/responses")
    async def responses(request: Request) -> Response:
        session, body = await _begin(gateway, request)
        previous = body.get("previous_response_id")
        ask = openai_responses.parse(body, session.said(previous) if previous else ())
        return await _respond(
            request,
            ask,
            session,
            lambda completion: openai_responses.render(completion, body),
            lambda call: openai_responses.events(call, body),
        )

    @dialect("/v1/messages")
    async def messages(request: Request) -> Response:
        session, body = await _begin(gateway, request)
        ask = anthropic_messages.parse(body)
        return await _respond(
            request,
            ask,
            session,
            lambda completion: anthropic_messages.render(completion, ask),
            lambda call: anthropic_messages.events(call, ask),
        )

    @app.get("/v1/models")
    async def models() -> Response:
        listed = {"id": model, "object": "model", "created": 0, "owned_by": "leeway"}
        return JSONResponse({"object": "list", "data": [listed]})

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"version": gateway.version})

    @app.post("/sessions")
    async def open_session(request: Request) -> Response:
        if token is not None and _key(request) != token:
            raise SessionError("the token is not rollout.gateway.token")
        taken = offers.take()
        if taken is None:
            raise OverBudgetError("no task may be begun now: the staleness budget is used up", 1.0)
        session, task, index = taken
        return JSONResponse(
            {
                "id": session.session_id,
                "api_key": session.key,
                "base_url": str(request.base_url) + "v1",
                "task": {
                    "task_id": task.task_id,
                    "index": index,
                    "messages": list(map(dict, task.messages)),
                    "columns": dict(task.columns),
                },
            }
        )

    @app.post("/sessions/{session_id}/rewards")
    async def rate(session_id: str, request: Request) -> Response:
        session, body = await _begin(gateway, request, session_id)
        if "turn" in body:
            session.rate(body.get("reward"), turn=body["turn"])
        else:
            session.finish(body)
        return JSONResponse({"id": session_id})

    @app.post("/sessions/{session_id}/close")
    async def close_session(session_id: str, request: Request) -> Response:
        session, body = await _begin(gateway, request, session_id)
        session.finish(body)
        session.closed.set()
        return JSONResponse({"id": session_id})

    app.add_exception_handler(LeewayError, _refusal)
    return app


@asynccontextmanager
async def serve(
    app: FastAPI, address: str, certificate: Path | None = None, key: Path | None = None
) -> AsyncIterator[str]:
    """Serves until the context ends, over TLS with a certificate; yields the address it bound.

    Raises:
        ConfigError: the address cannot be bound.
    """
    host, _, port = address.rpartition(":")
    try:
        listener = _listen(host.strip("[]"), int(port))
    except (OSError, ValueError) as error:
        raise ConfigError(f"rollout.gateway.address = {address}: {error}") from error
    server = _Server(
        uvicorn.Config(
            app,
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.wait({task})
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket that knows that it is TCP: only then asyncio turns Nagle's algorithm off,
    which costs every response 40 ms."""
    family, kind, protocol, _, where = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """The node's process has its own way to end."""
        yield


async def _begin(
    gateway: Gateway, request: Request, session_id: str | None = None
) -> tuple[Session, dict[str, Any]]:
    session = gateway.session(_key(request))
    if session_id not in (None, session.session_id):
        raise SessionError(f"session {session_id!r}: the API key belongs to another")
    try:
        body = json.loads(await request.body())
    except ValueError as error:
        raise DataError(f"body: not JSON: {error}") from error
    if not isinstance(body, dict):
        raise DataError("body: send a JSON object")
    return session, body


def _key(request: Request) -> str:
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    return request.headers.get("x-api-key") or bearer


async def _respond(
    request: Request,
    ask: Ask,
    session: Session,
    render: Callable[[Completion], Mapping[str, Any]],
    events: Callable[[Call], AsyncIterator[str]],
) -> Response:
    named = request.headers.get("idempotency-key")
    content = xxhash.xxh3_128_hexdigest(await request.body())
    retried = request.headers.get("x-stainless-retry-count", "0") != "0"
    call = session.ask(
        ask,
        named or f"{request.url.path} {content}",
        retry=named is not None or retried,
    )
    if ask.stream:
        await call.begun()
        return StreamingResponse(_delivering(call, events(call)), media_type="text/event-stream")
    completion = await _unless_gone(request, call)
    if completion is None:
        return Response(status_code=499)
    response = JSONResponse(render(completion))
    completion.delivered()
    return response


async def _delivering(call: Call, events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Ends early, by cancellation, when the client leaves."""
    async for event in events:
        yield event
    (await call.result()).delivered()


async def _unless_gone(request: Request, call: Call) -> Completion | None:
    """None when the client leaves before the result is there."""
    assert call.completion is not None  # set by `Session.ask` before anyone has the call
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({call.completion, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return None if leaving.done() else await call.result()
    finally:
        leaving.cancel()


def _refusal(request: Request, error: Exception) -> Response:
    status, kind, anthropic = 500, "server_error", "api_error"
    headers = {}
    if isinstance(error, SessionError):
        status, kind, anthropic = 401, "invalid_api_key", "authentication_error"
    elif isinstance(error, OverBudgetError):
        status, kind, anthropic = 429, "rate_limit_exceeded", "rate_limit_error"
        headers["Retry-After"] = f"{error.retry_seconds:g}"
    elif isinstance(error, DataError | EngineError):
        status, kind, anthropic = 400, "invalid_request_error", "invalid_request_error"
    elif isinstance(error, InfrastructureError):
        status, kind, anthropic = 503, "server_error", "overloaded_error"
    if request.url.path == "/v1/messages":
        body: dict[str, Any] = {
            "type": "error",
            "error": {"type": anthropic, "message": str(error)},
        }
    else:
        code = "context_length_exceeded" if "context_length_exceeded" in str(error) else kind
        body = {"error": {"message": str(error), "type": kind, "param": None, "code": code}}
    return JSONResponse(body, status_code=status, headers=headers)
