"""The queue's clients: what rollout nodes, trainers and operators call.

Every call has a deadline and a name, is retried while the queue is away or full, and may be
repeated without harm. Errors are those of `leeway.rpc.call`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import grpc

from leeway import rpc
from leeway.errors import (
    DataError,
    DeadlineError,
    EngineError,
    InfrastructureError,
    LeewayError,
    RewardError,
)
from leeway.trajectory import Group, Purpose, Task, Trajectory
from leeway.v1 import queue_pb2 as pb
from leeway.v1 import queue_pb2_grpc
from leeway.v1 import trajectory_pb2 as domain
from leeway.versions import Staleness

# A queue or a Redis that restarts is back well within this.
_PATIENCE_SECONDS = 120.0
_ATTEMPT_SECONDS = 30.0
# A stream is renewed now and then, so that a dead connection is noticed.
_STREAM_SECONDS = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
# A push is cut into messages of about this size: asyncio copies what it cannot send at once, again
# and again.
_PUSH_BYTES = 2 << 20


class FailureKind(IntEnum):
    """What an attempt died of; only DATA is never tried again."""

    INFRASTRUCTURE = pb.FAILURE_KIND_INFRASTRUCTURE
    DATA = pb.FAILURE_KIND_DATA
    REWARD = pb.FAILURE_KIND_REWARD

    @classmethod
    def of(cls, error: LeewayError) -> FailureKind:
        """Data will not get better; whatever is neither data nor a reward is infrastructure."""
        if isinstance(error, RewardError):
            return cls.REWARD
        return cls.DATA if isinstance(error, DataError | EngineError) else cls.INFRASTRUCTURE


@dataclass(frozen=True, slots=True)
class Lease:
    """A group to be rolled out.

    Attributes:
        attempt: Which try this is, from 1.
        ttl_seconds: From the answer until the lease expires unless extended.
        done: Indices that are in the queue already; not to be generated again.
        partials: Generations of a drained node, to be continued.
    """

    lease_id: str
    task: Task
    attempt: int
    ttl_seconds: float
    done: frozenset[int]
    partials: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Leases:
    """The answer to `lease_tasks`; see LeaseTasksResponse."""

    leases: tuple[Lease, ...]
    waiting_for: str
    needs_version: int | None
    run_finished: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    trajectory_id: str
    field: str
    message: str


@dataclass(frozen=True, slots=True)
class PushResult:
    """By trajectory id. Duplicates need nothing: they are queued, or their group has ended."""

    accepted: tuple[str, ...] = ()
    duplicates: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class Untrained:
    """Groups that ended without being trained since the trainer's last batch."""

    groups: int = 0
    trajectories: int = 0
    score_sum: float = 0.0


@dataclass(frozen=True, slots=True)
class Batch:
    """A leased batch. Tokens over the budget are masked already.

    Attributes:
        groups: In order of their sequence.
        staleness: Of each group's oldest trainable token before masking.
        budget: The one that the batch was checked under.
        masked_tokens: How many tokens the budget took out of the loss.
    """

    batch_id: str
    groups: tuple[Group, ...]
    staleness: tuple[Staleness, ...]
    budget: int
    masked_tokens: int
    untrained: Untrained


@dataclass(frozen=True, slots=True)
class Resumed:
    incarnation: int
    restored: int


class RolloutQueue:
    """A rollout node's side of the queue."""

    def __init__(self, channel: grpc.aio.Channel, node_id: str) -> None:
        self._stub = queue_pb2_grpc.TrajectoryQueueStub(channel)
        self._node_id = node_id

    async def lease_tasks(
        self, *, version: int, max_groups: int, wait_seconds: float, request_id: str
    ) -> Leases:
        """Waits up to `wait_seconds` for groups that may be generated with `version`.

        Args:
            request_id: A new one for each request; a repeated one gets the same leases.
        """
        answer = await rpc.call(
            self._stub.LeaseTasks,
            pb.LeaseTasksRequest(
                node_id=self._node_id,
                version=version,
                max_groups=max_groups,
                wait_seconds=wait_seconds,
                request_id=request_id,
            ),
            what="lease tasks from the queue",
            deadline_seconds=wait_seconds + _PATIENCE_SECONDS,
            attempt_seconds=wait_seconds + _ATTEMPT_SECONDS,
        )
        return Leases(
            leases=tuple(read_lease(lease) for lease in answer.leases),
            waiting_for=answer.waiting_for,
            needs_version=answer.needs_version if answer.HasField("needs_version") else None,
            run_finished=answer.run_finished,
        )

    async def extend(
        self,
        *,
        version: int,
        progress: Mapping[str, int],
        waiting: tuple[str, float] = ("", 0.0),
        load: float = 0.0,
    ) -> list[str]:
        """The heartbeat: keeps leases alive. Returns those that are no longer the node's.

        Args:
            progress: Tokens generated so far, by lease id.
            waiting: What the node waits for, and for how many seconds.
            load: How much of what it may generate at once it does; 1 when it has no room.
        """
        answer = await rpc.call(
            self._stub.Extend,
            pb.ExtendRequest(
                node_id=self._node_id,
                version=version,
                progress=[pb.Progress(lease_id=k, tokens=v) for k, v in progress.items()],
                waiting_for=waiting[0],
                waiting_seconds=waiting[1],
                load=load,
            ),
            what="extend leases",
            deadline_seconds=_PATIENCE_SECONDS,
        )
        return list(answer.lost)

    async def push(self, lease_id: str, trajectories: Sequence[Trajectory]) -> PushResult:
        """Hands finished, scored trajectories in. A refused one has cost the lease an attempt."""
        return await self.push_many([(lease_id, trajectory) for trajectory in trajectories])

    async def push_many(self, trajectories: Sequence[tuple[str, Trajectory]]) -> PushResult:
        """Like `push`, for (lease id, trajectory) of several leases at once."""
        results = [
            await rpc.call(
                self._stub.Push,
                request,
                what="push trajectories to the queue",
                deadline_seconds=_PATIENCE_SECONDS,
            )
            for request in _push_requests(trajectories)
        ]
        return PushResult(
            accepted=tuple(name for result in results for name in result.accepted),
            duplicates=tuple(name for result in results for name in result.duplicates),
            refused=tuple(
                Refusal(refusal.trajectory_id, refusal.field, refusal.message)
                for result in results
                for refusal in result.refused
            ),
        )

    async def give_back(self, lease_id: str, partials: Sequence[Trajectory] = ()) -> None:
        """Returns a lease, with generations that another node may continue. Not a failure."""
        await rpc.call(
            self._stub.Return,
            pb.ReturnRequest(
                node_id=self._node_id,
                lease_id=lease_id,
                partials=[partial.to_wire() for partial in partials],
            ),
            what="give a lease back",
            deadline_seconds=_PATIENCE_SECONDS,
        )

    async def fail(self, lease_id: str, kind: FailureKind, message: str) -> None:
        """Ends an attempt with its reason."""
        await rpc.call(
            self._stub.Fail,
            pb.FailRequest(
                node_id=self._node_id, lease_id=lease_id, kind=kind.value, message=message
            ),
            what="report a failed lease",
            deadline_seconds=_PATIENCE_SECONDS,
        )


class OperatorQueue:
    """What people and their tools ask of the queue."""

    def __init__(self, channel: grpc.aio.Channel, actor: str = "") -> None:
        self._stub = queue_pb2_grpc.TrajectoryQueueStub(channel)
        self._actor = actor

    async def status(self) -> pb.StatusResponse:
        answer: pb.StatusResponse = await self._ask(
            self._stub.Status, pb.StatusRequest(), "read the queue's status"
        )
        return answer

    async def set_budget(self, budget: int, actor: str = "") -> int:
        """Sets the staleness budget of the running run; returns the previous one.

        Args:
            actor: Who the audit names; by default this client.
        """
        request = pb.SetBudgetRequest(budget=budget, actor=actor or self._actor)
        answer = await self._ask(self._stub.SetBudget, request, "set the budget")
        return int(answer.previous)

    async def pause(self, paused: bool = True) -> None:
        """Holds admission back, or lets it go on."""
        request = pb.PauseRequest(paused=paused, actor=self._actor)
        await self._ask(self._stub.Pause, request, "pause admission")

    async def drain(self) -> None:
        """Ends the run: no new task is leased, and nodes end once nothing runs."""
        await self._ask(self._stub.Drain, pb.DrainRequest(actor=self._actor), "drain the queue")

    async def inspect(self, identifier: str) -> pb.InspectResponse:
        """What the queue holds of a task, or of a trajectory's task."""
        request = pb.InspectRequest(id=identifier)
        answer: pb.InspectResponse = await self._ask(
            self._stub.Inspect, request, "inspect the queue"
        )
        return answer

    async def dead(self, limit: int = 1000) -> list[pb.DeadTask]:
        request = pb.ListDeadRequest(limit=limit)
        return list((await self._ask(self._stub.ListDead, request, "list dead tasks")).tasks)

    async def requeue(self, task_ids: Sequence[str] = ()) -> int:
        """Gives dead tasks a fresh start; without ids, all of them."""
        request = pb.RequeueRequest(task_ids=task_ids, actor=self._actor)
        return int((await self._ask(self._stub.Requeue, request, "requeue dead tasks")).requeued)

    async def audit(self, limit: int = 100) -> list[pb.AuditRecord]:
        """What operators changed, newest first."""
        request = pb.ListAuditRequest(limit=limit)
        return list((await self._ask(self._stub.ListAudit, request, "read the audit")).records)

    async def _ask(self, method: Any, request: Any, what: str) -> Any:
        return await rpc.call(method, request, what=what, deadline_seconds=_PATIENCE_SECONDS)


class TrainerQueue(OperatorQueue):
    """A trainer's side of the queue. Call `resume` first, once a life."""

    def __init__(self, channel: grpc.aio.Channel, trainer_id: str, vocabulary: int = 0) -> None:
        """`vocabulary`: how many token ids the model knows; pushes with others are refused."""
        super().__init__(channel, actor=trainer_id)
        self._trainer_id = trainer_id
        self._vocabulary = vocabulary
        self._incarnation = 0

    async def resume(self, version: int, incarnation: int = 0) -> Resumed:
        """Begins a life at `version`: what was committed after it is queued again.

        Args:
            incarnation: Greater than every earlier one; 0 to be given the next.
        """
        answer = await self._ask(
            self._stub.Resume,
            pb.ResumeRequest(
                trainer_id=self._trainer_id,
                incarnation=incarnation,
                version=version,
                vocabulary=self._vocabulary,
            ),
            "resume the trainer",
        )
        self._incarnation = answer.incarnation
        return Resumed(answer.incarnation, answer.restored)

    async def enqueue(self, tasks: Sequence[Task]) -> int:
        """Adds tasks that the run does not know yet; returns how many those were."""
        request = pb.EnqueueTasksRequest(
            incarnation=self._incarnation, tasks=[task.to_wire() for task in tasks]
        )
        answer = await self._ask(self._stub.EnqueueTasks, request, "enqueue tasks")
        return int(answer.accepted)

    async def lease_batch(
        self,
        *,
        version: int,
        groups: int,
        deadline_seconds: float,
        purpose: Purpose = Purpose.TRAIN,
        task_ids: Sequence[str] = (),
        on_waiting: Callable[[str], None] = lambda waiting_for: None,
    ) -> Batch:
        """A whole batch: the oldest complete groups, checked against the budget at `version`.

        Until it is committed or released, calling again gives the same batch.

        Args:
            task_ids: Only these tasks' groups; those that ended otherwise are left out.
            on_waiting: Called whenever it changes what the batch waits for.

        Raises:
            DeadlineError: the batch was not full in time; says what it waited for.
            FencedError: a newer life of the trainer has taken over.
        """
        filling = _Filling()
        end = time.monotonic() + deadline_seconds
        pause = _FIRST_PAUSE
        while filling.untrained is None:
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"lease a batch: not full within {deadline_seconds:g} s; {filling.waiting_for}"
                )
            request = pb.LeaseBatchRequest(
                trainer_id=self._trainer_id,
                incarnation=self._incarnation,
                version=version,
                groups=groups,
                purpose=purpose.value,
                wait_seconds=min(left, _STREAM_SECONDS),
                task_ids=task_ids,
                received=list(filling.groups),
            )
            try:
                timeout = min(left, _STREAM_SECONDS) + _ATTEMPT_SECONDS
                async for message in self._stub.LeaseBatch(request, timeout=timeout):
                    filling.add(message, on_waiting)
                pause = _FIRST_PAUSE
            except grpc.aio.AioRpcError as error:
                failure = rpc.translate(error, "lease a batch")
                if not isinstance(failure, InfrastructureError):
                    raise failure from error
                filling.waiting_for = str(failure)
                await asyncio.sleep(min(pause, max(0.0, end - time.monotonic())))
                pause = min(2 * pause, _LONGEST_PAUSE)
        return filling.batch()

    async def commit(
        self,
        batch: Batch,
        *,
        version: int,
        tokens_trained: int = 0,
        tokens_masked: int = 0,
        metrics: Mapping[str, float] = MappingProxyType({}),
    ) -> int:
        """Says for good that training on the batch produced `version`.

        Args:
            metrics: Of the step, for those who watch the run.
        """
        answer = await self._ask(
            self._stub.Commit,
            pb.CommitRequest(
                trainer_id=self._trainer_id,
                incarnation=self._incarnation,
                batch_id=batch.batch_id,
                version=version,
                tokens_trained=tokens_trained,
                tokens_masked=tokens_masked or batch.masked_tokens,
                metrics=metrics,
            ),
            "commit a batch",
        )
        return int(answer.committed)

    async def release(self, batch: Batch) -> None:
        """Gives the batch back untrained."""
        request = pb.ReleaseRequest(
            trainer_id=self._trainer_id, incarnation=self._incarnation, batch_id=batch.batch_id
        )
        await self._ask(self._stub.Release, request, "release a batch")

    async def checkpointed(self, version: int) -> int:
        """A checkpoint of `version` is durable; returns how many groups were let go."""
        request = pb.CheckpointedRequest(incarnation=self._incarnation, version=version)
        answer = await self._ask(self._stub.Checkpointed, request, "report a checkpoint")
        return int(answer.payloads_freed)


@dataclass(slots=True)
class _Filling:
    """A batch as it comes in, over as many streams as it takes."""

    batch_id: str = ""
    budget: int = 0
    waiting_for: str = "the queue's answer"
    groups: dict[str, tuple[Group, Staleness]] = field(default_factory=dict)
    masked_tokens: int = 0
    untrained: Untrained | None = None

    def add(self, message: pb.LeaseBatchResponse, on_waiting: Callable[[str], None]) -> None:
        self.batch_id, self.budget = message.batch_id, message.budget
        for leased in message.leased:
            self._add_group(leased)
        if message.HasField("untrained"):
            u = message.untrained
            self.untrained = Untrained(u.groups, u.trajectories, u.score_sum)
        if message.waiting_for and message.waiting_for != self.waiting_for:
            self.waiting_for = message.waiting_for
            on_waiting(self.waiting_for)

    def _add_group(self, leased: pb.LeasedGroup) -> None:
        task = Task.from_wire(domain.Task.FromString(leased.task))
        group = Group(
            task,
            tuple(
                Trajectory.from_wire(domain.Trajectory.FromString(payload))
                for payload in leased.trajectories
            ),
        )
        if leased.HasField("mask_below_version"):
            group = self._masked(group, leased.mask_below_version)
        staleness = Staleness(
            in_flight=leased.staleness_in_flight,
            in_queue=leased.staleness - leased.staleness_in_flight,
        )
        self.groups[task.task_id] = (group, staleness)

    def _masked(self, group: Group, version: int) -> Group:
        trajectories = tuple(t.masked_below(version) for t in group.trajectories)
        for before, after in zip(group.trajectories, trajectories, strict=True):
            self.masked_tokens += before.trained_tokens - after.trained_tokens
        return replace(group, trajectories=trajectories)

    def batch(self) -> Batch:
        assert self.untrained is not None
        ordered = sorted(self.groups.values(), key=lambda pair: pair[0].task.sequence)
        return Batch(
            batch_id=self.batch_id,
            groups=tuple(group for group, _ in ordered),
            staleness=tuple(staleness for _, staleness in ordered),
            budget=self.budget,
            masked_tokens=self.masked_tokens,
            untrained=self.untrained,
        )


def read_lease(message: pb.TaskLease) -> Lease:
    return Lease(
        lease_id=message.lease_id,
        task=Task.from_wire(message.task),
        attempt=message.attempt,
        ttl_seconds=message.ttl_seconds,
        done=frozenset(message.done),
        partials=tuple(Trajectory.from_wire(partial) for partial in message.partials),
    )


def _push_requests(trajectories: Sequence[tuple[str, Trajectory]]) -> Iterator[pb.PushRequest]:
    request, size = pb.PushRequest(), 0
    for lease_id, trajectory in trajectories:
        payload = trajectory.to_wire().SerializeToString()
        if request.trajectories and size + len(payload) > _PUSH_BYTES:
            yield request
            request, size = pb.PushRequest(), 0
        request.trajectories.add(lease_id=lease_id, trajectory=payload)
        size += len(payload)
    if request.trajectories:
        yield request
