"""`leeway deploy check`: what an operator sees of a deployment from where the command runs.

Each finding says what was looked at and what came of it; nothing is changed. Run it on a laptop
with the operator's certificate, or in a pod of either cluster (`helm test` does).
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

import grpc
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from leeway import rpc
from leeway.config import Config, SecurityConfig
from leeway.deploy.credentials import utc_now
from leeway.errors import InfrastructureError, LeewayError
from leeway.roles import SANDBOX_NAME
from leeway.tokens import SKEW_SECONDS
from leeway.v1 import queue_pb2, queue_pb2_grpc

_SECONDS = 10.0
RENEW_DAYS = 30
"""A certificate that ends sooner is a warning."""


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    good: bool
    detail: str


async def check(config: Config, *, gpus: int = 0) -> AsyncIterator[Finding]:
    """Looks at everything, one finding after the other.

    Args:
        gpus: So many must be visible here.
    """
    yield _security(config.security)
    for name in ("certificate", "authority"):
        path = getattr(config.security, name)
        if path is not None:
            yield _certificate(f"security.{name}", path, utc_now())
    services = [
        ("queue", config.queue.address, config.security),
        ("weights", config.weights.address, config.security),
    ]
    if config.rollout.sandbox.address is not None:
        # Where nodes reach them; one of those that the name stands for is asked.
        security = config.security.model_copy(update={"server_name": SANDBOX_NAME})
        services.append(("sandbox", config.rollout.sandbox.address, security))
    for name, address, security in services:
        reached = await _attempt(f"{name} {address} is reachable", partial(_reach, address))
        yield reached
        if reached.good:
            async for finding in _service(name, address, security):
                yield finding
    if gpus:
        yield _gpus(gpus)


async def _attempt(what: str, look: Callable[[], Awaitable[str]]) -> Finding:
    try:
        async with asyncio.timeout(_SECONDS):
            return Finding(what, True, await look())
    except TimeoutError:
        return Finding(what, False, f"no answer within {_SECONDS:g} s")
    except grpc.aio.AioRpcError as error:
        return Finding(what, False, f"{error.code().name.lower()}: {error.details()}")
    except (OSError, LeewayError) as error:
        return Finding(what, False, str(error))


def _security(security: SecurityConfig) -> Finding:
    proof = "a certificate" if security.certificate is not None else "no certificate"
    token = security.token_file is not None or security.token is not None
    detail = f"{proof}, {'a token' if token else 'no token'}, " + (
        "TLS" if security.authority is not None else "no TLS"
    )
    return Finding("calls are secured", security.authority is not None, detail)


def _certificate(what: str, path: Path, now: datetime) -> Finding:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        return Finding(f"{what} is valid", False, f"{path}: {error}")
    days = (certificate.not_valid_after_utc - now).days
    begun = certificate.not_valid_before_utc <= now
    detail = f"{certificate.subject.rfc4514_string()}, ends in {days} days"
    return Finding(f"{what} is valid", begun and days >= RENEW_DAYS, detail)


async def _reach(address: str) -> str:
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    addresses = sorted({str(entry[4][0]) for entry in found})
    started = time.monotonic()
    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    milliseconds = (time.monotonic() - started) * 1000
    writer.close()
    return f"{', '.join(addresses)}, {milliseconds:.0f} ms"


async def _service(name: str, address: str, security: SecurityConfig) -> AsyncIterator[Finding]:
    async with rpc.connect(address, security) as channel:
        call = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=_SECONDS
        )

        async def serving() -> str:
            status = health_pb2.HealthCheckResponse.ServingStatus.Name((await call).status)
            if status != "SERVING":
                raise InfrastructureError(status.lower())
            return "the certificate is trusted" if security.authority is not None else "plain text"

        health = await _attempt(f"{name} serves", serving)
        yield health
        if not health.good:
            return
        told = {key: str(value) for key, value in await call.initial_metadata()}
        yield _versions(name, told.get(rpc.VERSION, "unknown"), version("leeway"))
        yield _clock(name, float(told.get(rpc.TIME, "nan")), time.time())
        if name == "queue":
            yield await _attempt("the queue lets this caller in", lambda: _status(channel))
            yield await _attempt("Redis keeps what it is given", lambda: _redis(channel))


def _versions(name: str, theirs: str, ours: str) -> Finding:
    """Two releases that follow each other understand each other."""
    (major, minor), (our_major, our_minor) = (_major_minor(text) for text in (theirs, ours))
    good = major == our_major and abs(minor - our_minor) <= 1
    return Finding(f"{name} has a release that fits", good, f"{theirs} there, {ours} here")


def _major_minor(text: str) -> tuple[int, int]:
    parts = text.split(".")
    known = len(parts) >= 2 and parts[0].isdigit() and parts[1].isdigit()
    return (int(parts[0]), int(parts[1])) if known else (-1, -1)


def _clock(name: str, theirs: float, ours: float) -> Finding:
    seconds = theirs - ours
    good = abs(seconds) < SKEW_SECONDS / 2
    return Finding(f"{name} has the same time", good, f"{seconds:+.1f} s")


async def _status(channel: grpc.aio.Channel) -> str:
    stub = queue_pb2_grpc.TrajectoryQueueStub(channel)
    status = await stub.Status(queue_pb2.StatusRequest(), timeout=_SECONDS)
    silent = [node.node_id for node in status.nodes if node.seen_seconds_ago > 60]
    return f"run {status.run_id}, version {status.version}, {len(status.nodes)} nodes" + (
        f", silent: {', '.join(silent)}" if silent else ""
    )


async def _redis(channel: grpc.aio.Channel) -> str:
    """The queue looks at its Redis before it serves, and says so."""
    request = health_pb2.HealthCheckRequest(service=rpc.REDIS)
    answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=_SECONDS)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise InfrastructureError("the queue has not verified it")
    return "append-only file, no eviction"


def _gpus(wanted: int) -> Finding:
    found = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    detail = f"{len(found)} of {wanted}: {', '.join(found) or 'none'}"
    return Finding("GPUs are visible", len(found) >= wanted, detail)
