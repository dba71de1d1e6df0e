"""The rollout node: lease, roll out, push.

One node runs supervised loops: it leases tasks while there is room, has its workflow roll them out,
keeps its leases alive with heartbeats, and receives new policies. A failure of one trajectory costs
its group one attempt and nothing else; a failure of a loop ends the node with its reason.

On `stop` the node drains: it leases nothing more, aborts what runs, returns the partial generations
to the queue for other nodes to continue, and ends.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog
from prometheus_client import Counter, Gauge

from leeway.config import Config
from leeway.errors import InfrastructureError
from leeway.health import HEALTH
from leeway.telemetry import Spans, Waits
from leeway.traces import TRACES
from leeway.trajectory import Trajectory
from rollout_service.concurrency import AdaptiveConcurrency
from rollout_service.engines.base import Engine
from rollout_service.receiver import PolicyReceiver
from rollout_service.workflows.base import (
    Event,
    Failed,
    Generated,
    Interrupted,
    Sample,
    Workflow,
)
from trajectory_queue.client import Lease, RolloutQueue

log = structlog.get_logger(__name__)

_UNFINISHED = Gauge("leeway_rollout_unfinished_samples", "Samples that this node generates now")
_LIMIT = Gauge("leeway_rollout_concurrency_limit", "Samples that this node may generate at once")
_KV_USE = Gauge("leeway_rollout_kv_use", "The part of the engine's KV cache that is in use")
_TOKENS = Counter("leeway_rollout_tokens_total", "Tokens of samples that this node finished")

# Long enough that an idle node costs the queue little, short enough to notice `stop` in time.
_LEASE_WAIT_SECONDS = 2.0


@dataclass(slots=True)
class _Running:
    """A lease that this node is rolling out."""

    lease: Lease
    open: dict[str, Sample] = field(default_factory=dict)
    """Every sample that has not ended, by its id."""
    partials: list[Trajectory] = field(default_factory=list)
    interrupted: bool = False
    """Some of its samples were aborted: it must be given back."""
    ended: bool = False
    """Failed, lost or returned: what still arrives for it is dropped."""
    tokens: int = 0
    """Of the samples that have ended."""
    since: float = field(default_factory=time.time)


class RolloutNode:
    """Wires an engine to the queue; see the module's docstring."""

    def __init__(
        self,
        config: Config,
        node_id: str,
        engine: Engine,
        queue: RolloutQueue,
        receiver: PolicyReceiver,
        workflow: Workflow,
        spans: Spans,
    ) -> None:
        self._config = config
        self._node_id = node_id
        self._engine = engine
        self._queue = queue
        self._receiver = receiver
        self._workflow = workflow
        self._spans = spans
        self._waits = Waits()
        self._running: dict[str, _Running] = {}
        self._owners: dict[str, _Running] = {}
        # Leases that have not begun: there is no place for them yet.
        self._held: deque[tuple[Lease, Sequence[Sample]]] = deque()
        self._unfinished = 0
        rollout = config.rollout
        self._adaptive = (
            AdaptiveConcurrency(rollout.auto, config.queued_group_size)
            if rollout.concurrency == "auto"
            else None
        )
        _LIMIT.set(self._concurrency)
        # What the queue said when it last had no task for this node.
        self._admission = ""
        self._busy_since: float | None = None
        self._changed = asyncio.Event()
        self._draining = False

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set or the queue says that the run is finished."""
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._receiver.run()),
                tasks.create_task(self._heartbeats()),
            ]
            if self._adaptive is not None:
                background.append(tasks.create_task(self._adapt(self._adaptive)))
            leasing = tasks.create_task(self._lease_and_roll_out())
            stopping = tasks.create_task(stop.wait())
            await asyncio.wait({leasing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not leasing.done():
                await self._drain(leasing)
            for task in (*background, stopping):
                task.cancel()

    # Leasing ------------------------------------------------------------------------------------

    async def _lease_and_roll_out(self) -> None:
        await self._receiver.wait_for(0, self._config.trainer.batch_seconds)
        HEALTH.set_ready()
        async with asyncio.TaskGroup() as self._rollouts:
            while not self._draining:
                groups = await self._room()
                kind = "further tasks" if self._unfinished else "tasks"
                with self._waits.waiting_for(kind, self._admission):
                    leased = await self._queue.lease_tasks(
                        version=self._engine.version,
                        max_groups=groups,
                        wait_seconds=_LEASE_WAIT_SECONDS,
                        request_id=uuid.uuid4().hex,
                    )
                self._admission = leased.waiting_for
                if leased.run_finished:
                    self._held.clear()
                    return
                if leased.leases:
                    self._held.extend((lease, _samples(lease)) for lease in leased.leases)
                    self._begin()
                elif leased.needs_version is not None:
                    with self._waits.waiting_for("weights", f"version {leased.needs_version}"):
                        await self._await_version(leased.needs_version)

    async def _room(self) -> int:
        """Waits until another group may be leased, and says how many may.

        With a budget of 0 the node leases only when idle, and its share of a batch: then that is
        one call to the engine, and the run of a single node is reproducible bit by bit.
        """
        size, batch = self._config.queued_group_size, self._config.queued_batch_groups
        ahead = self._config.rollout.prefetch_groups
        while True:
            room = (self._concurrency - self._unfinished) // size + ahead - len(self._held)
            if self._unfinished == 0 and not self._running and not self._held:
                # A group larger than the node's concurrency runs by itself.
                return -(-batch // self._config.rollout.nodes) if self._in_step else max(room, 1)
            if room >= 1 and not self._in_step:
                return room
            self._changed.clear()
            await self._changed.wait()

    def _begin(self) -> None:
        """Begins the leases that are held, as far as there are places."""
        work = []
        while self._held and not self._draining:
            size = len(self._held[0][1])
            fits = self._unfinished + size <= self._concurrency
            if not (fits or self._in_step or self._unfinished == 0):
                break
            work.append(self._held.popleft())
            # Before they run: the next request asks for what these leave.
            self._count(size)
        if work:
            self._rollouts.create_task(self._roll_out(work))

    @property
    def _in_step(self) -> bool:
        """Nothing is generated while the trainer learns."""
        return self._config.staleness.first_budget == 0

    @property
    def _concurrency(self) -> int:
        """Samples that may be under way."""
        if self._adaptive is not None:
            return self._adaptive.limit
        return self._config.rollout.most_concurrency

    async def _adapt(self, adaptive: AdaptiveConcurrency) -> None:
        """`rollout.concurrency: auto`: the limit follows what the engine says of itself."""
        while True:
            await asyncio.sleep(self._config.rollout.auto.period_seconds)
            try:
                load = await self._engine.load()
            except InfrastructureError as error:
                log.warning("the engine does not say how it copes", reason=str(error))
                continue
            _KV_USE.set(load.kv_use)
            before = adaptive.limit
            change = adaptive.observe(load, self._unfinished)
            if change is not None:
                log.info("concurrency", was=before, now=change.limit, reason=change.reason)
                _LIMIT.set(change.limit)
                self._begin()
                self._changed.set()

    async def _await_version(self, version: int) -> None:
        try:
            await self._receiver.wait_for(version, _LEASE_WAIT_SECONDS)
        except InfrastructureError:
            return  # The queue is asked again: it may need another version by now.

    # Rolling out --------------------------------------------------------------------------------

    async def _roll_out(self, work: Sequence[tuple[Lease, Sequence[Sample]]]) -> None:
        """Rolls leases out as one call of the workflow; pushes each sample as it ends."""
        everything = [sample for _, samples in work for sample in samples]
        if not await self._hold_version([lease for lease, _ in work]):
            self._count(-len(everything))
            self._begin()
            return
        for lease, samples in work:
            running = _Running(lease, open={sample.sample_id: sample for sample in samples})
            self._running[lease.lease_id] = running
            self._owners.update(dict.fromkeys(running.open, running))
        await self._workflow.run(everything, self._take)

    async def _hold_version(self, leases: Sequence[Lease]) -> bool:
        """Waits for the version that the tasks ask for; gives the leases back if it is late."""
        version = max(lease.task.min_version for lease in leases)
        if version <= self._engine.version:
            return True
        try:
            await self._receiver.wait_for(version, self._config.queue.lease_seconds)
        except InfrastructureError as error:
            log.warning("leases given back", reason=str(error))
            for lease in leases:
                await self._queue.give_back(lease.lease_id)
            return False
        return True

    async def _take(self, event: Event) -> None:
        """What became of a sample; a failure ends the attempt of its whole group."""
        name = event.sample.sample_id
        running = self._owners[name]
        if isinstance(event, Generated):
            self._count(-1)
            self._begin()
            return
        try:
            if isinstance(event, Failed):
                await self._give_up(running, event)
            elif isinstance(event, Interrupted):
                running.interrupted = True
                if event.partial is not None:
                    running.partials.append(event.partial)
            elif not running.ended:
                await self._push(running, event.trajectory)
        finally:
            del self._owners[name], running.open[name]
            if not running.open:
                task = running.lease.task.task_id
                TRACES.span(task, "roll out", running.since, tokens=running.tokens)
                self._running.pop(running.lease.lease_id, None)
                self._changed.set()

    async def _push(self, running: _Running, trajectory: Trajectory) -> None:
        running.tokens += trajectory.trained_tokens
        _TOKENS.inc(trajectory.trained_tokens)
        result = await self._queue.push(running.lease.lease_id, [trajectory])
        for refusal in result.refused:
            log.error(
                "trajectory refused", trajectory=refusal.trajectory_id, reason=refusal.message
            )

    async def _give_up(self, running: _Running, failure: Failed) -> None:
        if running.ended:
            return
        running.ended = True
        task_id = running.lease.task.task_id
        log.warning("rollout failed", task=task_id, kind=failure.kind.name, reason=failure.reason)
        await self._queue.fail(running.lease.lease_id, failure.kind, failure.reason)
        await self._workflow.abort(list(running.open))

    def _count(self, change: int) -> None:
        """Keeps the number of unfinished samples, and the spans in which there were any."""
        if self._unfinished == 0 and change > 0:
            self._busy_since = time.time()
        self._unfinished += change
        _UNFINISHED.set(self._unfinished)
        if self._unfinished:
            HEALTH.progress("generation", self._config.queue.stall_seconds)
        else:
            HEALTH.done("generation")
        if self._unfinished == 0 and self._busy_since is not None:
            self._spans.record("generate", self._busy_since, time.time())
            self._busy_since = None
        self._changed.set()

    # Keeping and giving back --------------------------------------------------------------------

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._config.rollout.heartbeat_seconds)
            lost = await self._queue.extend(
                version=self._engine.version,
                progress={
                    lease_id: run.tokens + self._workflow.progress(run.open)
                    for lease_id, run in self._running.items()
                }
                | {lease.lease_id: 0 for lease, _ in self._held},
                waiting=self._waits.current(),
                load=min(1.0, self._unfinished / self._concurrency),
            )
            self._held = deque(held for held in self._held if held[0].lease_id not in lost)
            for lease_id in lost:
                running = self._running.get(lease_id)
                if running is not None:
                    log.warning("lease lost", task=running.lease.task.task_id)
                    running.ended = True
                    await self._workflow.abort(list(running.open))

    async def _drain(self, leasing: asyncio.Task[None]) -> None:
        """Aborts what runs and returns its partial generations, within `drain_seconds`."""
        self._draining = True
        HEALTH.set_ready("draining")
        self._changed.set()
        leases = [running for running in self._running.values() if not running.ended]
        log.info("draining", leases=len(leases))
        try:
            async with asyncio.timeout(self._config.rollout.drain_seconds):
                await self._workflow.abort([name for run in leases for name in list(run.open)])
                for lease, _ in self._held:
                    await self._queue.give_back(lease.lease_id)
                await asyncio.wait({leasing})
                for running in leases:
                    if running.interrupted:
                        await self._queue.give_back(running.lease.lease_id, running.partials)
        except TimeoutError:
            log.warning("drain deadline reached; leases will expire")
            leasing.cancel()


def _samples(lease: Lease) -> list[Sample]:
    """Those of the group that are not in the queue already."""
    partials = {partial.index: partial for partial in lease.partials}
    return [
        Sample(f"{lease.lease_id}/{index}", lease.task, index, partials.get(index))
        for index in range(lease.task.group_size)
        if index not in lease.done
    ]
