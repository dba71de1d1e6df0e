"""`leeway sandbox`: the worker pool of the run's reward function or environment, for its nodes.

It dials nobody and holds nothing that leases or trains: nodes come to it, and ask its judges for
it. It runs what its own configuration names and nothing else.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import structlog
from prometheus_client import Gauge

from leeway import rpc
from leeway.config import Config, TaskConfig
from leeway.errors import ConfigError, InfrastructureError, LeewayError
from leeway.health import HEALTH
from leeway.v1 import sandbox_pb2 as pb
from leeway.v1 import sandbox_pb2_grpc as pb_grpc
from rollout_service.sandbox.pool import WorkerPool
from rollout_service.sandbox.remote import MESSAGE_BYTES, WIRE_SECONDS
from rollout_service.sandbox.work import Caller, Work
from trajectory_queue.client import FailureKind

log = structlog.get_logger(__name__)

_BUSY = Gauge("leeway_sandbox_busy_workers", "Calls and episodes that have a worker now")
_WAITING = Gauge("leeway_sandbox_waiting_calls", "Calls and episodes that stand in line for one")

_NAME = pb.DESCRIPTOR.services_by_name["Sandbox"].full_name
# Beyond, nodes are sent away: the line is bounded.
_MOST_WAITING = 4096
# Nodes connect anew so often, and so find sandboxes that have come since.
_CONNECTION_SECONDS = 60.0

Requests = AsyncIterator[pb.WorkRequest]
Tell = Callable[[pb.WorkResponse], Awaitable[None]]


class JudgesByName:
    """A task's judges without their keys: the node whose call it is asks them."""

    def __init__(self, task: TaskConfig) -> None:
        self.names = list(task.judges)
        self.seconds = task.judge_seconds

    async def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        raise InfrastructureError(f"judge {question['judge']!r}: only nodes ask judges")


class SandboxService(pb_grpc.SandboxServicer):
    """A worker a stream, out of one pool."""

    def __init__(self, pool: WorkerPool, work: Work, judges: JudgesByName) -> None:
        self._pool = pool
        self._work = work
        self._judges = judges
        self._waiting = 0

    async def Work(  # noqa: N802
        self, requests: Requests, context: Any
    ) -> AsyncIterator[pb.WorkResponse]:
        try:
            async with asyncio.timeout(WIRE_SECONDS):
                begin = (await anext(requests, pb.WorkRequest())).begin
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "nothing came after the call")
            raise AssertionError("abort raises") from None
        if refusal := self._refusal(begin):
            await context.abort(grpc.StatusCode.UNAVAILABLE, refusal)
        yield pb.WorkResponse(accepted=pb.Accepted())
        told: asyncio.Queue[pb.WorkResponse | None] = asyncio.Queue()

        async def work() -> None:
            try:
                await self._serve(begin.patience_seconds, requests, told.put)
            finally:
                told.put_nowait(None)

        working = asyncio.create_task(work())
        try:
            while (message := await told.get()) is not None:
                yield message
            await working
        finally:
            working.cancel()
            await asyncio.wait({working})

    def _refusal(self, begin: pb.Begin) -> str:
        """Why the node must go elsewhere for now; during an upgrade the two may have different
        runs."""
        ours = (self._work.kind, self._work.spec, self._judges.names)
        theirs = (begin.work, begin.spec, list(begin.judges))
        if ours != theirs:
            return f"this sandbox runs {ours}, and was asked for {theirs}"
        return "the line is full" if self._waiting >= _MOST_WAITING else ""

    async def _serve(self, patience: float, requests: Requests, tell: Tell) -> None:
        """All of one stream; what the pool raises before there is a worker is told as well."""

        async def ask_judge(question: Mapping[str, Any]) -> dict[str, Any]:
            await tell(pb.WorkResponse(question=json.dumps(dict(question))))
            return await self._reply(requests)

        try:
            with ExitStack() as line:
                line.enter_context(self._in_line())
                async with self._pool.take(patience or None, ask_judge) as ask:
                    line.close()
                    with _BUSY.track_inprogress():
                        await self._keep(ask, requests, tell)
        except LeewayError as error:
            await tell(_failure(error))

    @contextmanager
    def _in_line(self) -> Iterator[None]:
        self._waiting += 1
        try:
            with _WAITING.track_inprogress():
                yield
        finally:
            self._waiting -= 1

    async def _keep(self, ask: Caller, requests: Requests, tell: Tell) -> None:
        """Raises `InfrastructureError` when the node keeps the worker for too long."""
        seconds = self._work.kept_seconds + WIRE_SECONDS
        try:
            async with asyncio.timeout(seconds):
                await tell(pb.WorkResponse(taken=pb.Taken()))
                async for message in requests:
                    await tell(await _answer(ask, message.request))
        except TimeoutError as error:
            raise InfrastructureError(
                f"{self._work.spec}: a worker was kept for more than {seconds:g} s"
            ) from error

    async def _reply(self, requests: Requests) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._judges.seconds + WIRE_SECONDS):
                message = await anext(requests, pb.WorkRequest())
        except TimeoutError as error:
            raise InfrastructureError("the node did not answer for its judge") from error
        if message.reply.WhichOneof("kind") != "answers":
            raise InfrastructureError(message.reply.failed or "the node left")
        reply: dict[str, Any] = json.loads(message.reply.answers)
        return reply


async def _answer(ask: Caller, request: str) -> pb.WorkResponse:
    try:
        return pb.WorkResponse(answer=json.dumps(await ask(json.loads(request))))
    except LeewayError as error:
        return _failure(error)


def _failure(error: LeewayError) -> pb.WorkResponse:
    if isinstance(error, ConfigError):
        # It could be loaded when the sandbox began: what it needs has gone since.
        log.error("the code cannot be loaded any more", reason=str(error))
    kind = FailureKind.of(error).value
    return pb.WorkResponse(failure=pb.WorkFailure(kind=kind, message=str(error)))


async def serve(
    config: Config,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serves workers until `stop` is set; then what is under way may end (`drain_seconds`).

    Args:
        on_ready: Called with the address once the service answers.

    Raises:
        ConfigError: the code cannot be used, or the address cannot be bound.
        InfrastructureError: the code's process died or hung while it was loading.
    """
    settings, work = config.rollout.sandbox, Work.of(config.task)
    if settings.address is None:
        raise ConfigError("rollout.sandbox.address is not set: give the host:port to serve at")
    judges = JudgesByName(config.task)
    async with WorkerPool(work, judges) as pool:
        service = SandboxService(pool, work, judges)

        async def setup(server: rpc.Server) -> None:
            await server.add(pb_grpc.add_SandboxServicer_to_server, service, _NAME)

        async with rpc.serve(
            settings.address,
            config.security,
            setup,
            max_message_bytes=MESSAGE_BYTES,
            grace_seconds=settings.drain_seconds,
            connection_seconds=_CONNECTION_SECONDS,
        ) as server:
            HEALTH.set_ready()
            log.info("sandbox is serving", address=server.address, runs=work.spec)
            on_ready(server.address)
            await stop.wait()
            HEALTH.set_ready("draining")
            await server.set_serving(_NAME, False)
            log.info("draining")
