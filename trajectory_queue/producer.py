"""The client of programs whose traffic becomes trajectories.

A producer serves the policy itself, wherever that is, and keeps what it sampled: ids, behaviour
log-probabilities, and the version of the weights. For every conversation it opens a task, which
waits for a place in the staleness budget, and pushes the scored trajectory under the task's lease.
Calls have deadlines and may be repeated, as those of `client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from leeway import rpc
from leeway.trajectory import Trajectory
from leeway.v1 import queue_pb2 as pb
from leeway.v1 import queue_pb2_grpc
from leeway.v1 import trajectory_pb2 as domain
from trajectory_queue.client import FailureKind, Lease, PushResult, RolloutQueue, read_lease

_PATIENCE_SECONDS = 120.0
_ATTEMPT_SECONDS = 30.0
_BEATS_PER_LEASE = 4


@dataclass(frozen=True, slots=True)
class Opened:
    """The answer to `open_task`.

    Attributes:
        lease: None when the task was not opened; `lease.task` has the run's sampling.
        waiting_for: Why not.
        needs_version: The producer must first serve this version.
        run_finished: No task will be opened any more.
        known: The task was opened before, and its lease has ended: it is done, or lost.
    """

    lease: Lease | None
    waiting_for: str
    needs_version: int | None
    run_finished: bool
    known: bool


class ProducerQueue:
    """A producer's side of the queue.

    Args:
        producer_id: Lasting: leases belong to it.
    """

    def __init__(self, channel: grpc.aio.Channel, producer_id: str) -> None:
        self._stub = queue_pb2_grpc.TrajectoryQueueStub(channel)
        self._producer_id = producer_id
        self._queue = RolloutQueue(channel, producer_id)

    async def version(self) -> int:
        """The trainer's newest policy version."""
        status = await rpc.call(
            self._stub.Status,
            pb.StatusRequest(),
            what="ask the queue for its version",
            deadline_seconds=_PATIENCE_SECONDS,
        )
        return int(status.version)

    async def open_task(
        self,
        task_id: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        version: int,
        columns: Mapping[str, Any] | None = None,
        wait_seconds: float = 30.0,
    ) -> Opened:
        """Waits up to `wait_seconds` for a place in the budget.

        Args:
            task_id: Unique in the run; repeated, the same lease comes while it is held.
            version: Of the weights that serve the conversation.
        """
        task = domain.Task(
            task_id=task_id,
            messages_json=json.dumps([dict(message) for message in messages]),
            columns_json=json.dumps(dict(columns or {})),
        )
        request = pb.OpenTaskRequest(
            producer_id=self._producer_id, version=version, task=task, wait_seconds=wait_seconds
        )
        answer = await rpc.call(
            self._stub.OpenTask,
            request,
            what="open a task in the queue",
            deadline_seconds=wait_seconds + _PATIENCE_SECONDS,
            attempt_seconds=wait_seconds + _ATTEMPT_SECONDS,
        )
        return Opened(
            lease=read_lease(answer.lease) if answer.HasField("lease") else None,
            waiting_for=answer.waiting_for,
            needs_version=answer.needs_version if answer.HasField("needs_version") else None,
            run_finished=answer.run_finished,
            known=answer.known,
        )

    @contextlib.asynccontextmanager
    async def keeping(self, lease: Lease, version: int) -> AsyncIterator[None]:
        """Keeps a lease alive while the conversation lasts."""

        async def beat() -> None:
            beats = 0
            while True:
                await asyncio.sleep(lease.ttl_seconds / _BEATS_PER_LEASE)
                beats += 1
                await self._queue.extend(version=version, progress={lease.lease_id: beats})

        beating = asyncio.create_task(beat())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.wait({beating})

    async def push(self, lease: Lease, trajectories: Sequence[Trajectory]) -> PushResult:
        """Hands scored trajectories in; a refused one ends the task with the reason."""
        return await self._queue.push(lease.lease_id, trajectories)

    async def fail(self, lease: Lease, kind: FailureKind, message: str) -> None:
        """Ends the task without a trajectory; its place in the budget is free again."""
        await self._queue.fail(lease.lease_id, kind, message)
