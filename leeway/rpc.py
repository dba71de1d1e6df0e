"""Channels and servers: the one place that knows gRPC's options.

Every call carries a deadline. A server binds to loopback unless it is secured: it asks for client
certificates, or for tokens; `leeway/guard.py` then checks every call. Health (`grpc.health.v1`) and
reflection are always on. Message sizes are bounded on both ends.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
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
from leeway.guard import CORE_LIMIT, Guard, send_tokens
from leeway.tokens import KeyFiles, Keys, Signer, Verifier, shared_key

log = structlog.get_logger(__name__)

Response = TypeVar("Response")

# Keepalive finds a dead peer within a minute, also through NAT gateways that forget idle flows.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
# Trajectories come in messages of megabytes: frames of the default 16 KiB cost more CPU than they.
_FRAMES = (("grpc.http2.max_frame_size", 4 << 20),)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
# Who has gone is forgotten, and who has come is found, within seconds.
_SPREAD: tuple[tuple[str, int | str], ...] = (
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.dns_min_time_between_resolutions_ms", int(_LONGEST_PAUSE * 1000)),
)
# The peer is away. The last two no server of ours says: something between us, a load balancer that
# restarts for one, has reset the stream or damaged it.
_AWAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.CANCELLED,
)
# Names the seconds after which a refused caller may try again. RESOURCE_EXHAUSTED without it comes
# from gRPC, for a message that is too large, and would come again.
RETRY_AFTER = "leeway-retry-after"
# What comes with an answer of the health service: the server's release, and its clock.
VERSION, TIME = "leeway-version", "leeway-time"
REDIS = "redis"
"""The name under which a queue's health service says that it has verified its Redis."""


def connect(
    address: str,
    security: SecurityConfig,
    max_message_bytes: int = 64 << 20,
    *,
    spread: bool = False,
) -> grpc.aio.Channel:
    """A channel to `address`; it connects, and reconnects, by itself.

    Args:
        spread: Over all that the address's name stands for, call by call; otherwise one of them.
    """
    options: list[tuple[str, int | str]] = [
        *_KEEPALIVE,
        *_FRAMES,
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_reconnect_backoff_ms", int(_LONGEST_PAUSE * 1000)),
    ]
    if spread:
        options += _SPREAD
    keys = client_keys(security)
    interceptors = send_tokens(Signer(keys)) if keys is not None else []
    if security.authority is None:
        return grpc.aio.insecure_channel(address, options, interceptors=interceptors)
    if security.server_name is not None:
        options.append(("grpc.ssl_target_name_override", security.server_name))
    credentials = grpc.ssl_channel_credentials(_pem(security.authority), *_key_and_chain(security))
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
            failure = translate(error, what)
            if not isinstance(failure, InfrastructureError):
                raise failure from error
            wait = max(pause, _retry_after(error) or 0.0)
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
    if error.code() in _AWAY or _retry_after(error) is not None:
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
    connection_seconds: float | None = None,
) -> AsyncIterator[Server]:
    """Serves what `setup` adds while the context lasts; `Server.address` has the real port.

    Args:
        grace_seconds: At the end, what is under way may take so long; nothing new is taken.
        connection_seconds: Clients must connect anew so often; by default never.

    Raises:
        ConfigError: the address is not loopback and nothing secures it, or it cannot be bound.
    """
    if not security.secured and not is_loopback(address):
        raise ConfigError(
            f"address = {address!r}: not loopback, and neither security.certificate, "
            "security.accepted_tokens nor security.token is set; secure it or bind to 127.0.0.1"
        )
    keys = server_keys(security)
    verifier = Verifier(keys) if keys is not None else None
    guard = Guard(verifier, security.asks_for_certificates, max_message_bytes)
    aging = []
    if connection_seconds is not None:
        aging.append(("grpc.max_connection_age_ms", int(connection_seconds * 1000)))
    server = grpc.aio.server(
        options=[
            *_KEEPALIVE,
            *_FRAMES,
            *aging,
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", CORE_LIMIT * max_message_bytes),
            ("grpc.so_reuseport", 0),
        ],
        interceptors=[guard],
    )
    health_service = _Health()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    handle = Server(server, health_service)
    await setup(handle)
    handle.enable_reflection()
    try:
        if security.certificate is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, _server_credentials(security))
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


def _retry_after(error: grpc.aio.AioRpcError) -> float | None:
    for key, value in error.trailing_metadata() or ():
        if key == RETRY_AFTER:
            return float(value)
    return None


class _Health(health.HealthServicer):
    """Also says which release this is and what time it has, for `leeway deploy check`."""

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        facts = ((VERSION, version("leeway")), (TIME, f"{time.time():.3f}"))
        await context.send_initial_metadata(facts)
        return await super().Check(request, context)


def client_keys(security: SecurityConfig) -> Keys | None:
    """What a client signs its tokens with; None when it has nothing."""
    if security.token_file is not None:
        return KeyFiles(security.token_file)
    return shared_key(security.token.get_secret_value()) if security.token is not None else None


def server_keys(security: SecurityConfig) -> Keys | None:
    """Whose tokens a server accepts; None when it asks for none."""
    if security.accepted_tokens is not None:
        return KeyFiles(security.accepted_tokens)
    return shared_key(security.token.get_secret_value()) if security.token is not None else None


def _server_credentials(security: SecurityConfig) -> grpc.ServerCredentials:
    """Read again at every handshake, so that a renewed certificate needs no restart."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        authority = _pem(security.authority) if security.asks_for_certificates else None
        return grpc.ssl_server_certificate_configuration([_key_and_chain(security)], authority)

    return grpc.dynamic_ssl_server_credentials(
        configuration(), configuration, security.asks_for_certificates
    )


def _key_and_chain(security: SecurityConfig) -> tuple[bytes | None, bytes | None]:
    return _pem(security.key), _pem(security.certificate)


def _pem(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"security: {error.filename}: {error.strerror}") from error
