"""Channels and servers: the one place that knows gRPC's options.

Every call carries a deadline. A server binds to loopback unless it is secured (bearer token or
mutual TLS). Health (`grpc.health.v1`) and reflection are always on. Message sizes are bounded on
both ends.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from leeway.config import SecurityConfig
from leeway.errors import (
    ConfigError,
    DeadlineError,
    FencedError,
    InfrastructureError,
    LeewayError,
    WireError,
)

log = structlog.get_logger(__name__)

Response = TypeVar("Response")

# Keepalive finds a dead peer within a minute, also through NAT gateways that forget idle flows.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_RETRYABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
# Names the seconds after which a refused caller may try again (RESOURCE_EXHAUSTED).
RETRY_AFTER = "leeway-retry-after"


def connect(
    address: str, security: SecurityConfig, max_message_bytes: int = 64 << 20
) -> grpc.aio.Channel:
    """A channel to `address`; it connects, and reconnects, by itself."""
    options = [
        *_KEEPALIVE,
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_reconnect_backoff_ms", int(_LONGEST_PAUSE * 1000)),
    ]
    token = security.token.get_secret_value() if security.token is not None else None
    interceptors = [kind(token) for kind in _SEND_TOKEN] if token is not None else []
    if security.certificate is None:
        return grpc.aio.insecure_channel(address, options, interceptors=interceptors)
    chain, key, authority = _pem(security)
    credentials = grpc.ssl_channel_credentials(authority, key, chain)
    return grpc.aio.secure_channel(address, credentials, options, interceptors=interceptors)


async def call(
    method: Callable[..., Awaitable[Response]],
    request: Any,
    *,
    what: str,
    deadline_seconds: float,
    attempt_seconds: float = 30.0,
) -> Response:
    """Makes a unary call, trying again while the peer is away or full, until the deadline.

    Args:
        what: Names the call in errors ("lease tasks from the queue").
        attempt_seconds: Deadline of one attempt.

    Raises:
        DeadlineError: the peer stayed away until the deadline; names `what` and the last cause.
        FencedError: a newer incarnation has taken over.
        WireError: the peer refused the request as malformed or not allowed.
    """
    end = time.monotonic() + deadline_seconds
    pause = _FIRST_PAUSE
    while True:
        left = end - time.monotonic()
        try:
            return await method(request, timeout=max(0.001, min(left, attempt_seconds)))
        except grpc.aio.AioRpcError as error:
            timed_out = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if error.code() not in _RETRYABLE and not timed_out:
                raise translate(error, what) from error
            wait = max(pause, _retry_after(error))
            if time.monotonic() + wait >= end:
                raise DeadlineError(
                    f"{what}: no answer within {deadline_seconds:g} s; last: "
                    f"{error.code().name.lower()}: {error.details()}"
                ) from error
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE)


def translate(error: grpc.aio.AioRpcError, what: str) -> LeewayError:
    """The typed error for a failed call."""
    message = f"{what}: {error.details()}"
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return FencedError(message)
    if error.code() in _RETRYABLE or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return InfrastructureError(message)
    return WireError(f"{what}: {error.code().name.lower()}: {error.details()}")


class Server:
    """A gRPC server being set up; see `serve`."""

    def __init__(self, server: grpc.aio.Server, health_service: health.HealthServicer) -> None:
        self._server = server
        self._health = health_service
        self._names = [health_pb2.DESCRIPTOR.services_by_name["Health"].full_name]
        self.address = ""

    async def add(
        self, register: Callable[[Any, grpc.aio.Server], None], servicer: object, name: str
    ) -> None:
        """Adds a service by its generated `add_..._to_server` and its full name."""
        register(servicer, self._server)
        self._names.append(name)
        await self.set_serving(name, True)

    async def set_serving(self, name: str, serving: bool) -> None:
        """What the health service answers for `name`."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    def enable_reflection(self) -> None:
        reflection.enable_server_reflection([*self._names, reflection.SERVICE_NAME], self._server)


@asynccontextmanager
async def serve(
    address: str,
    security: SecurityConfig,
    setup: Callable[[Server], Awaitable[None]],
    max_message_bytes: int = 64 << 20,
    grace_seconds: float = 1.0,
) -> AsyncIterator[Server]:
    """Serves what `setup` adds while the context lasts; `Server.address` has the real port.

    Raises:
        ConfigError: the address is not loopback and nothing secures it, or it cannot be bound.
    """
    if not security.secured and not is_loopback(address):
        raise ConfigError(
            f"address = {address!r}: not loopback, and neither security.token nor "
            "security.certificate is set; secure it or bind to 127.0.0.1"
        )
    token = security.token.get_secret_value() if security.token is not None else None
    server = grpc.aio.server(
        options=[
            *_KEEPALIVE,
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.so_reuseport", 0),
        ],
        interceptors=[_CheckToken(token)] if token is not None else [],
    )
    health_service = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    handle = Server(server, health_service)
    await setup(handle)
    handle.enable_reflection()
    try:
        if security.certificate is None:
            port = server.add_insecure_port(address)
        else:
            chain, key, authority = _pem(security)
            port = server.add_secure_port(
                address,
                grpc.ssl_server_credentials([(key, chain)], authority, require_client_auth=True),
            )
    except RuntimeError as error:
        raise ConfigError(f"address = {address!r}: cannot be bound: {error}") from error
    handle.address = f"{address.rpartition(':')[0]}:{port}"
    await server.start()
    try:
        yield handle
    finally:
        await server.stop(grace_seconds)


def is_loopback(address: str) -> bool:
    """Whether host:port (or unix:path) can only be reached from this machine."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _retry_after(error: grpc.aio.AioRpcError) -> float:
    for key, value in error.trailing_metadata() or ():
        if key == RETRY_AFTER:
            return float(value)
    return 0.0


def _pem(security: SecurityConfig) -> tuple[bytes, bytes, bytes]:
    paths = (security.certificate, security.key, security.authority)
    try:
        chain, key, authority = (path.read_bytes() for path in paths if path is not None)
    except OSError as error:
        raise ConfigError(f"security: {error.filename}: {error.strerror}") from error
    return chain, key, authority


class _SendToken:
    """Adds the bearer token to every call."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    async def _send(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), self._header)
        return await continuation(details._replace(metadata=metadata), request)


class _SendTokenUnaryUnary(_SendToken, grpc.aio.UnaryUnaryClientInterceptor):
    intercept_unary_unary = _SendToken._send


class _SendTokenUnaryStream(_SendToken, grpc.aio.UnaryStreamClientInterceptor):
    intercept_unary_stream = _SendToken._send


class _SendTokenStreamUnary(_SendToken, grpc.aio.StreamUnaryClientInterceptor):
    intercept_stream_unary = _SendToken._send


class _SendTokenStreamStream(_SendToken, grpc.aio.StreamStreamClientInterceptor):
    intercept_stream_stream = _SendToken._send


# grpc.aio registers an interceptor for one kind of call only, whatever it inherits from.
_SEND_TOKEN = (
    _SendTokenUnaryUnary,
    _SendTokenUnaryStream,
    _SendTokenStreamUnary,
    _SendTokenStreamStream,
)


class _CheckToken(grpc.aio.ServerInterceptor):
    """Refuses calls without the token; health checks need none."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}"

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        given = dict(details.invocation_metadata).get("authorization", "")
        if (
            handler is None
            or details.method.startswith("/grpc.health.v1.")
            or hmac.compare_digest(given.encode(), self._expected.encode())
        ):
            return handler
        log.warning("call refused: missing or wrong token", method=details.method)
        return _refusing(handler)


def _refusing(handler: Any) -> Any:
    async def refuse(_request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong bearer token")

    async def refuse_stream(_request: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong bearer token")
        yield

    serializers = (handler.request_deserializer, handler.response_serializer)
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_stream, *serializers)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(refuse, *serializers)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream, *serializers)
    return grpc.unary_unary_rpc_method_handler(refuse, *serializers)
