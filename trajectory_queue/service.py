"""The gRPC service: turns requests into commands, waits on behalf of callers, maps errors.

It keeps no state of its own beyond wake-ups: any number of services may share a store. Long polls
look again whenever something changed; nothing here blocks the event loop for long.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import zip_longest
from typing import Any, TypeAlias

import grpc
import structlog

from leeway import rpc
from leeway.errors import DataError, FencedError, InfrastructureError, WireError
from leeway.guard import CALLER
from leeway.health import HEALTH
from leeway.roles import Role
from leeway.traces import TRACES
from leeway.v1 import queue_pb2 as pb
from leeway.v1 import queue_pb2_grpc
from leeway.v1 import trajectory_pb2 as domain
from trajectory_queue import commands as c
from trajectory_queue import explain, messages
from trajectory_queue.door import examine
from trajectory_queue.fleet_size import FleetSize
from trajectory_queue.history import History
from trajectory_queue.metrics import COLLECTOR
from trajectory_queue.signals import pause
from trajectory_queue.store import StoreFullError
from trajectory_queue.terms import Terms

log = structlog.get_logger(__name__)

_LONGEST_WAIT_SECONDS = 300.0
# A wait looks again after so long even if nobody woke it.
_RECHECK_SECONDS = 5.0
# Nodes may hold a version this long before its commit arrives.
_AHEAD_SECONDS = 5.0
_AHEAD_PAUSE_SECONDS = 0.1
_TEND_SECONDS = 1.0
# Trajectories of one push that are examined before others get their turn.
_EXAMINED_AT_ONCE = 64
_RETRY_SECONDS = 1.0
# Payloads read from the store, and sent, at once.
_FETCH_BYTES = 1 << 20
# Groups of a checkpoint that are let go before others get their turn at the store.
_FREED_AT_ONCE = 256
_CHANGES_SHOWN = 20
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class QueueService(queue_pb2_grpc.TrajectoryQueueServicer):
    """Serves one run's queue out of `store`."""

    def __init__(
        self, store: c.Store, settings: c.Settings, terms: Terms, history: History
    ) -> None:
        """`history` is kept while the service tends the store."""
        self._store = store
        self._settings = settings
        self._terms = terms
        self._history = history
        self._fleet_size = FleetSize()

    async def tend(self, stop: asyncio.Event) -> None:
        """Takes leases back from silent nodes, and keeps the metrics fresh, until `stop`."""
        while not stop.is_set():
            try:
                expired = await self._store.apply(c.Expire())
                report = await self._store.apply(c.Status())
                changes = await self._store.apply(c.ListAudit(_CHANGES_SHOWN))
                decision = self._fleet_size.observe(report)
                if decision is not None:
                    log.info("nodes wanted", count=decision.nodes, reason=decision.reason)
                COLLECTOR.update(report, self._fleet_size.wanted)
                status = messages.status_response(report, self._fleet_size.wanted)
                self._history.add(status, messages.audit_records(changes))
            except InfrastructureError as error:
                log.warning("the store does not answer", reason=str(error))
                HEALTH.set_ready(f"the store does not answer: {error}")
            else:
                HEALTH.set_ready()
                if expired.count:
                    log.warning("leases expired: their nodes fell silent", count=expired.count)
            await pause(_TEND_SECONDS, stop)

    # Producers ------------------------------------------------------------------------------------

    async def EnqueueTasks(  # noqa: N802
        self, request: pb.EnqueueTasksRequest, context: Context
    ) -> pb.EnqueueTasksResponse:
        async with _answering(context):
            tasks = tuple(messages.new_task(task) for task in request.tasks)
            added = await self._store.apply(c.Enqueue(request.incarnation, tasks))
            return pb.EnqueueTasksResponse(accepted=added.accepted, duplicates=added.duplicates)

    async def OpenTask(  # noqa: N802
        self, request: pb.OpenTaskRequest, context: Context
    ) -> pb.OpenTaskResponse:
        async with _answering(context):
            task = self._terms.applied(request.task)
            command = c.Open(
                request.producer_id, request.version, messages.new_task(task, external=True)
            )
            leased = await self._leasing(command, request.wait_seconds)
            for _ in leased.leases:
                TRACES.begin(task.task_id, "open", node=request.producer_id)
            return pb.OpenTaskResponse(
                lease=messages.task_lease(leased.leases[0]) if leased.leases else None,
                waiting_for=explain.task_wait(leased, self._settings),
                needs_version=leased.needs_version,
                run_finished=leased.run_finished,
                known=leased.wait is c.Wait.KNOWN,
            )

    async def _leasing(
        self, command: c.Command[c.TasksLeased], wait_seconds: float
    ) -> c.TasksLeased:
        """Applies the command again and again until something is leased, or never will be."""
        deadline = _Deadline(wait_seconds)
        while True:
            changed = self._store.signals.listen("tasks")
            leased = await self._store.apply(command)
            if (
                leased.leases
                or leased.needs_version is not None
                or leased.run_finished
                or leased.wait is c.Wait.KNOWN
                or deadline.over
            ):
                return leased
            await self._store.signals.wait("tasks", changed, deadline.left(_RECHECK_SECONDS))

    # Rollout nodes --------------------------------------------------------------------------------

    async def LeaseTasks(  # noqa: N802
        self, request: pb.LeaseTasksRequest, context: Context
    ) -> pb.LeaseTasksResponse:
        async with _answering(context):
            command = c.LeaseTasks(
                request.node_id,
                request.version,
                request.max_groups,
                request.request_id or uuid.uuid4().hex,
            )
            leased = await self._leasing(command, request.wait_seconds)
            answer = pb.LeaseTasksResponse(
                leases=[messages.task_lease(lease) for lease in leased.leases],
                waiting_for=explain.task_wait(leased, self._settings),
                needs_version=leased.needs_version,
                run_finished=leased.run_finished,
            )
            for lease in answer.leases:
                if lease.attempt == 1:
                    TRACES.begin(lease.task.task_id, "lease", node=request.node_id)
            return answer

    async def Extend(  # noqa: N802
        self, request: pb.ExtendRequest, context: Context
    ) -> pb.ExtendResponse:
        async with _answering(context):
            _only_own(each.lease_id for each in request.progress)
            extended = await self._store.apply(
                c.Extend(
                    request.node_id,
                    request.version,
                    tuple(c.Progress(each.lease_id, each.tokens) for each in request.progress),
                    request.waiting_for,
                    int(request.waiting_seconds * 1000),
                    messages.percent(request.load),
                )
            )
            return pb.ExtendResponse(lost=extended.lost)

    async def Push(  # noqa: N802
        self, request: pb.PushRequest, context: Context
    ) -> pb.PushResponse:
        async with _answering(context):
            _only_own(item.lease_id for item in request.trajectories)
            examined: list[c.Entry | c.AtTheDoor] = []
            for number, item in enumerate(request.trajectories):
                examined.append(examine(item.lease_id, item.trajectory))
                if number % _EXAMINED_AT_ONCE == _EXAMINED_AT_ONCE - 1:
                    await asyncio.sleep(0)
            arrived = time.time()
            entries = tuple(item for item in examined if isinstance(item, c.Entry))
            at_the_door = tuple(item for item in examined if isinstance(item, c.AtTheDoor))
            _only_own((entry.lease_id for entry in entries), [entry.task_id for entry in entries])
            deadline = _Deadline(_AHEAD_SECONDS)
            while True:
                command = c.Push(entries, at_the_door, patient=not deadline.over)
                pushed = await self._store.apply(command)
                if not pushed.ahead:
                    break
                await asyncio.sleep(_AHEAD_PAUSE_SECONDS)
            if pushed.full:
                raise StoreFullError(
                    f"the queue holds queue.max_bytes = {self._settings.max_bytes} bytes and a "
                    "whole batch; the push is held back until the trainer has consumed"
                )
            for refused in pushed.refused:
                log.warning(
                    "trajectory refused", trajectory=refused.trajectory_id, reason=str(refused)
                )
            for entry in entries:
                TRACES.span(entry.task_id, "push", arrived, trajectory=entry.trajectory_id)
            return pb.PushResponse(
                accepted=pushed.accepted,
                duplicates=pushed.duplicates,
                refused=[
                    pb.Refusal(
                        trajectory_id=refused.trajectory_id,
                        field=refused.field,
                        message=str(refused),
                    )
                    for refused in pushed.refused
                ],
            )

    async def Return(  # noqa: N802
        self, request: pb.ReturnRequest, context: Context
    ) -> pb.ReturnResponse:
        async with _answering(context):
            partials = tuple(messages.partial(partial) for partial in request.partials)
            await self._store.apply(c.GiveBack(request.node_id, request.lease_id, partials))
            return pb.ReturnResponse()

    async def Fail(  # noqa: N802
        self, request: pb.FailRequest, context: Context
    ) -> pb.FailResponse:
        async with _answering(context):
            _only_own([request.lease_id])
            failure = messages.FAILURES.get(request.kind)
            if failure is None:
                raise DataError(f"kind = {request.kind}: say infrastructure, data or reward")
            await self._store.apply(
                c.Fail(request.node_id, request.lease_id, failure, request.message)
            )
            return pb.FailResponse()

    # Trainers -------------------------------------------------------------------------------------

    async def LeaseBatch(  # noqa: N802
        self, request: pb.LeaseBatchRequest, context: Context
    ) -> AsyncIterator[pb.LeaseBatchResponse]:
        async with _answering(context):
            command = c.LeaseBatch(
                trainer_id=request.trainer_id,
                incarnation=request.incarnation,
                version=request.version,
                groups=request.groups,
                lane=messages.lane(request.purpose),
                task_ids=tuple(request.task_ids),
                batch_id=uuid.uuid4().hex,
            )
            wanted = len(request.task_ids) or request.groups
            sent = set(request.received)
            said = ""
            deadline = _Deadline(request.wait_seconds)
            while True:
                changed = self._store.signals.listen("groups")
                batch = await self._store.apply(command)
                new = [group for group in batch.groups if group.task_id not in sent]
                async for message in self._groups(batch, new):
                    yield message
                sent.update(group.task_id for group in new)
                if batch.full:
                    yield pb.LeaseBatchResponse(
                        batch_id=batch.batch_id,
                        budget=batch.budget,
                        untrained=pb.Untrained(
                            groups=batch.untrained.groups,
                            trajectories=batch.untrained.trajectories,
                            score_sum=batch.untrained.score_sum,
                        ),
                    )
                    return
                waiting_for = explain.batch_wait(batch, wanted, self._settings)
                if waiting_for != said:
                    said = waiting_for
                    yield pb.LeaseBatchResponse(
                        batch_id=batch.batch_id, budget=batch.budget, waiting_for=waiting_for
                    )
                if deadline.over:
                    return
                await self._store.signals.wait("groups", changed, deadline.left(_RECHECK_SECONDS))

    async def _groups(
        self, batch: c.BatchLeased, groups: Sequence[c.GroupLease]
    ) -> AsyncIterator[pb.LeaseBatchResponse]:
        for chunk in _chunks(groups):
            fetched = await self._store.apply(c.Fetch(tuple(group.task_id for group in chunk)))
            message = pb.LeaseBatchResponse(batch_id=batch.batch_id, budget=batch.budget)
            for group, payload in zip(chunk, fetched.payloads, strict=True):
                if not payload.task:
                    raise FencedError(
                        f"task {group.task_id} left the batch: a newer life of the trainer resumed"
                    )
                message.leased.add(
                    task=payload.task,
                    trajectories=payload.trajectories,
                    staleness=group.staleness,
                    staleness_in_flight=group.in_flight,
                    mask_below_version=group.mask_below,
                )
            yield message

    async def Commit(  # noqa: N802
        self, request: pb.CommitRequest, context: Context
    ) -> pb.CommitResponse:
        async with _answering(context):
            committed = await self._store.apply(
                c.Commit(
                    trainer_id=request.trainer_id,
                    incarnation=request.incarnation,
                    batch_id=request.batch_id,
                    version=request.version,
                    tokens_trained=request.tokens_trained,
                    tokens_masked=request.tokens_masked,
                    metrics=messages.metrics_text(request.metrics),
                )
            )
            return pb.CommitResponse(committed=committed.count)

    async def Release(  # noqa: N802
        self, request: pb.ReleaseRequest, context: Context
    ) -> pb.ReleaseResponse:
        async with _answering(context):
            await self._store.apply(
                c.Release(request.trainer_id, request.incarnation, request.batch_id)
            )
            return pb.ReleaseResponse()

    async def Checkpointed(  # noqa: N802
        self, request: pb.CheckpointedRequest, context: Context
    ) -> pb.CheckpointedResponse:
        async with _answering(context):
            command = c.Checkpointed(request.incarnation, request.version, _FREED_AT_ONCE)
            freed = 0
            while True:
                some = await self._store.apply(command)
                freed += some.count
                if some.count < command.most:
                    return pb.CheckpointedResponse(payloads_freed=freed)

    async def Resume(  # noqa: N802
        self, request: pb.ResumeRequest, context: Context
    ) -> pb.ResumeResponse:
        async with _answering(context):
            resumed = await self._store.apply(
                c.Resume(
                    request.trainer_id, request.incarnation, request.version, request.vocabulary
                )
            )
            log.info(
                "trainer resumed",
                trainer=request.trainer_id,
                incarnation=resumed.incarnation,
                version=request.version,
                restored_groups=resumed.restored,
            )
            return pb.ResumeResponse(incarnation=resumed.incarnation, restored=resumed.restored)

    # Operators ------------------------------------------------------------------------------------

    async def Status(  # noqa: N802
        self, request: pb.StatusRequest, context: Context
    ) -> pb.StatusResponse:
        async with _answering(context):
            report = await self._store.apply(c.Status())
            return messages.status_response(report, self._fleet_size.wanted)

    async def SetBudget(  # noqa: N802
        self, request: pb.SetBudgetRequest, context: Context
    ) -> pb.SetBudgetResponse:
        async with _answering(context):
            if request.budget < 0:
                raise DataError(f"budget = {request.budget}: use 0 or more")
            changed = await self._store.apply(c.SetBudget(request.budget, request.actor))
            log.info(
                "budget set", actor=request.actor, previous=changed.previous, budget=request.budget
            )
            return pb.SetBudgetResponse(previous=changed.previous)

    async def Pause(  # noqa: N802
        self, request: pb.PauseRequest, context: Context
    ) -> pb.PauseResponse:
        async with _answering(context):
            await self._store.apply(c.Pause(request.paused, request.actor))
            log.info("admission", actor=request.actor, paused=request.paused)
            return pb.PauseResponse()

    async def Drain(  # noqa: N802
        self, request: pb.DrainRequest, context: Context
    ) -> pb.DrainResponse:
        async with _answering(context):
            await self._store.apply(c.Drain(request.actor))
            log.info("draining: no task is leased any more", actor=request.actor)
            return pb.DrainResponse()

    async def Inspect(  # noqa: N802
        self, request: pb.InspectRequest, context: Context
    ) -> pb.InspectResponse:
        async with _answering(context):
            found = await self._store.apply(c.Inspect(request.id))
            if not found.task_id:
                raise DataError(
                    f"id = {request.id!r}: no task or trajectory that the queue still holds"
                )
            fetched = await self._store.apply(c.Fetch((found.task_id,)))
            payload = fetched.payloads[0]
            return pb.InspectResponse(
                task_id=found.task_id,
                state=found.state,
                attempts=found.attempts,
                reasons=found.reasons,
                group=domain.Group(
                    task=domain.Task.FromString(payload.task),
                    trajectories=[
                        domain.Trajectory.FromString(each) for each in payload.trajectories
                    ],
                ),
            )

    async def ListDead(  # noqa: N802
        self, request: pb.ListDeadRequest, context: Context
    ) -> pb.ListDeadResponse:
        async with _answering(context):
            dead = await self._store.apply(c.ListDead(request.limit))
            return pb.ListDeadResponse(
                tasks=[pb.DeadTask(task_id=t.task_id, reasons=t.reasons) for t in dead.tasks]
            )

    async def Requeue(  # noqa: N802
        self, request: pb.RequeueRequest, context: Context
    ) -> pb.RequeueResponse:
        async with _answering(context):
            requeued = await self._store.apply(c.Requeue(tuple(request.task_ids), request.actor))
            log.info("dead tasks requeued", actor=request.actor, count=requeued.count)
            return pb.RequeueResponse(requeued=requeued.count)

    async def ListAudit(  # noqa: N802
        self, request: pb.ListAuditRequest, context: Context
    ) -> pb.ListAuditResponse:
        async with _answering(context):
            audit = await self._store.apply(c.ListAudit(request.limit))
            return pb.ListAuditResponse(records=messages.audit_records(audit))


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + min(max(seconds, 0.0), _LONGEST_WAIT_SECONDS)

    @property
    def over(self) -> bool:
        return self._loop.time() >= self._end

    def left(self, most: float) -> float:
        return min(most, max(0.0, self._end - self._loop.time()))


@asynccontextmanager
async def _answering(context: Context) -> AsyncIterator[None]:
    """Errors of the enclosed block, as the status that tells the caller what to do."""
    try:
        yield
    except FencedError as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    except (DataError, WireError) as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except StoreFullError as error:
        retry = ((rpc.RETRY_AFTER, str(_RETRY_SECONDS)),)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), retry)
    except InfrastructureError as error:
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))


def _only_own(lease_ids: Iterable[str], task_ids: Iterable[str] = ()) -> None:
    """Producers reach what they opened, and nothing that nodes generate.

    Raises:
        DataError: a lease is not of `OpenTask`, or of another task.
    """
    if CALLER.get() & {Role.ROLLOUT}:
        return
    for lease_id, task_id in zip_longest(lease_ids, task_ids):
        opened = lease_id.startswith(c.open_lease(""))
        if not opened or task_id not in (None, lease_id.removeprefix(c.open_lease(""))):
            raise DataError(
                f"lease_id = {lease_id!r}: a producer may use the leases that OpenTask gave it, "
                "each for its own task" + (f", not for {task_id!r}" if task_id is not None else "")
            )


def _chunks(groups: Sequence[c.GroupLease]) -> Iterator[list[c.GroupLease]]:
    """Runs of groups that are read from the store at once."""
    chunk: list[c.GroupLease] = []
    size = 0
    for group in groups:
        if chunk and size + group.payload_bytes > _FETCH_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(group)
        size += group.payload_bytes
    if chunk:
        yield chunk
