"""A node's workers in the pods of `leeway sandbox`.

One stream a worker that is kept, spread over the sandboxes behind one address. Judges are asked
here, where their keys are.

What must hold: a sandbox that is away, restarts or falls silent is infrastructure, with a deadline,
and never an answer. A call that stands alone and loses its sandbox is made again at another; what
an episode had done is lost with its process, so that the episode fails.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import structlog
from prometheus_client import Counter

from leeway import rpc
from leeway.config import Config, SecurityConfig
from leeway.errors import (
    DataError,
    DeadlineError,
    InfrastructureError,
    LeewayError,
    RewardError,
    WireError,
)
from leeway.roles import SANDBOX_NAME
from leeway.v1 import queue_pb2
from leeway.v1 import sandbox_pb2 as pb
from leeway.v1 import sandbox_pb2_grpc as pb_grpc
from rollout_service.sandbox.work import START_SECONDS, Caller, Judges, Work

log = structlog.get_logger(__name__)

LOST = Counter(
    "leeway_sandbox_lost_total", "Times that a sandbox was away, or went away during a call"
)

MESSAGE_BYTES = 16 << 20
"""The largest message, either way. A worker's answer is at most a quarter of it."""
WIRE_SECONDS = 10.0
"""What the way there and back may take beyond a deadline that is kept at the other end."""
# How long a sandbox may be away, e.g. while its pod is replaced, before a call fails for it.
_AWAY_SECONDS = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
# How often a call that stands alone is made again: one that kills its sandbox must not kill all.
_MOST_REPEATS = 2
# By default a call waits so long for a free worker.
_PATIENCE_SECONDS = 600.0
_REFUSED = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT,
)


class SandboxLostError(InfrastructureError):
    """The stream to a sandbox ended, or it fell silent."""


def as_client(config: Config) -> SecurityConfig:
    """By what a node knows a sandbox, and proves who it is to it."""
    token_file = config.rollout.sandbox.token_file or config.security.token_file
    changed = {"server_name": SANDBOX_NAME, "token_file": token_file}
    return config.security.model_copy(update=changed)


@asynccontextmanager
async def sandboxes(
    config: Config, address: str, work: Work, judges: Judges
) -> AsyncIterator[Sandboxes]:
    """The `Workers` behind an address, for the duration of the context.

    Raises:
        DeadlineError: no sandbox that runs the work is there.
        WireError: it does not let this node in.
    """
    security = as_client(config)
    async with rpc.connect(address, security, MESSAGE_BYTES, spread=True) as channel:
        workers = Sandboxes(channel, address, work, judges)
        try:
            async with workers.take():
                pass
            yield workers
        finally:
            workers.closed = True


class Sandboxes:
    """`Workers` over a channel.

    Attributes:
        closed: Nothing is asked any more; what is under way ends with an `InfrastructureError`.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str, work: Work, judges: Judges) -> None:
        self._stub = pb_grpc.SandboxStub(channel)
        self.closed = False
        self._address = address
        self._work = work
        self._judges = judges

    async def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """See `Workers`."""
        repeats = 0
        while True:
            try:
                async with self.take() as ask:
                    return await ask(request)
            except SandboxLostError as error:
                repeats += 1
                if self.closed or repeats > _MOST_REPEATS:
                    raise
                log.warning("call is made again", reason=str(error))

    @asynccontextmanager
    async def take(self, patience: float | None = None) -> AsyncIterator[Caller]:
        """See `Workers`."""
        stream = await self._open(patience or _PATIENCE_SECONDS)
        try:

            async def ask(request: Mapping[str, Any]) -> dict[str, Any]:
                stream.say(pb.WorkRequest(request=json.dumps(dict(request))))
                while True:
                    told = await stream.hear(self._work.seconds + WIRE_SECONDS)
                    if told.HasField("question"):
                        stream.say(pb.WorkRequest(reply=await self._ask_judge(told.question)))
                        continue
                    _raise_failure(told)
                    answer: dict[str, Any] = json.loads(told.answer)
                    return answer

            yield ask
            await stream.end()
        finally:
            stream.cancel()

    async def _open(self, patience: float) -> _Stream:
        """A stream whose worker waits for requests."""
        begin = pb.Begin(
            work=self._work.kind,
            spec=self._work.spec,
            judges=self._judges.names,
            patience_seconds=patience,
        )
        taking = patience + START_SECONDS + WIRE_SECONDS
        clock = asyncio.get_running_loop().time
        there = started = clock()
        pause = _FIRST_PAUSE
        while True:
            if self.closed:
                raise InfrastructureError(f"{self._work.spec}: the way to the sandboxes is closed")
            stream = _Stream(self._stub, taking + self._work.kept_seconds + WIRE_SECONDS)
            accepted = taken = False
            try:
                stream.say(pb.WorkRequest(begin=begin))
                await stream.hear(WIRE_SECONDS)
                accepted = True
                _raise_failure(await stream.hear(taking))
                taken = True
                return stream
            except SandboxLostError as error:
                there = clock() if accepted else there
                if clock() + pause >= min(there + _AWAY_SECONDS, started + patience):
                    raise DeadlineError(
                        f"rollout.sandbox.address = {self._address}: no sandbox for "
                        f"{self._work.spec} within {clock() - there:.0f} s; last: {error}"
                    ) from error
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            finally:
                if not taken:
                    stream.cancel()

    async def _ask_judge(self, question: str) -> pb.JudgeReply:
        try:
            return pb.JudgeReply(
                answers=json.dumps(await self._judges.answer(json.loads(question)))
            )
        except InfrastructureError as error:
            return pb.JudgeReply(failed=str(error))


class _Stream:
    """One worker that is kept.

    Args:
        seconds: The deadline of all of it.
    """

    def __init__(self, stub: pb_grpc.SandboxStub, seconds: float) -> None:
        self._outgoing: asyncio.Queue[pb.WorkRequest | None] = asyncio.Queue()
        self._call = stub.Work(self._requests(), timeout=seconds)
        self._answers = self._call.__aiter__()

    def say(self, message: pb.WorkRequest) -> None:
        """Raises `DataError` when it is larger than may be."""
        if message.ByteSize() > MESSAGE_BYTES:
            raise DataError(
                f"{message.ByteSize()} bytes for a sandbox, which takes {MESSAGE_BYTES}: keep the "
                "row's columns smaller"
            )
        self._outgoing.put_nowait(message)

    async def hear(self, seconds: float) -> pb.WorkResponse:
        """The next answer.

        Raises:
            SandboxLostError: there is none.
            WireError: it does not let this node in.
        """
        try:
            async with asyncio.timeout(seconds):
                answer: pb.WorkResponse = await anext(self._answers)
                return answer
        except TimeoutError as error:
            LOST.inc()
            raise SandboxLostError(f"the sandbox said nothing for {seconds:g} s") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this task, but the call: its channel was closed.
            raise SandboxLostError("the channel to the sandboxes was closed") from error
        except StopAsyncIteration as error:
            LOST.inc()
            raise SandboxLostError("the sandbox ended the stream") from error
        except grpc.aio.AioRpcError as error:
            raise _typed(error) from error

    async def end(self) -> None:
        """Gives the worker back."""
        self._outgoing.put_nowait(None)
        with suppress(TimeoutError, grpc.aio.AioRpcError):
            async with asyncio.timeout(WIRE_SECONDS):
                async for _ in self._answers:
                    pass

    def cancel(self) -> None:
        """Leaves; a call that is under way ends with its process."""
        self._outgoing.put_nowait(None)  # Of a stream that has failed, nobody else ends them.
        self._call.cancel()

    async def _requests(self) -> AsyncIterator[pb.WorkRequest]:
        while (message := await self._outgoing.get()) is not None:
            yield message


def _typed(error: grpc.aio.AioRpcError) -> LeewayError:
    message = f"sandbox: {error.code().name.lower()}: {error.details()}"
    if error.code() in _REFUSED:
        return WireError(message)
    LOST.inc()
    return SandboxLostError(message)


def _raise_failure(told: pb.WorkResponse) -> None:
    if not told.HasField("failure"):
        return
    kinds: dict[int, type[LeewayError]] = {
        queue_pb2.FAILURE_KIND_REWARD: RewardError,
        queue_pb2.FAILURE_KIND_DATA: DataError,
    }
    raise kinds.get(told.failure.kind, InfrastructureError)(told.failure.message)
