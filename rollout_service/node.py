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


@dataclass(slots=True, eq=False)
class _Leased:
    """A lease of this node: it waits for a place, then its samples are rolled out."""

    lease: Lease
    open: dict[str, Sample]
    """Every sample that has not ended, by its id."""
    partials: list[Trajectory] = field(default_factory=list)
    interrupted: bool = False
    """Some of its samples were aborted: it must be given back."""
    ended: bool = False
    """Failed, lost or returned: what still arrives for it is dropped."""
    tokens: int = 0
    """Of the samples that have ended."""
    since: float = 0.0
    """When it began; Unix seconds."""


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
        self._leases: dict[str, _Leased] = {}
        self._owners: dict[str, _Leased] = {}
        # Those that have not begun: there is no place for them yet.
        self._held: deque[_Leased] = deque()
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
                    taken = [_Leased(lease, _samples(lease)) for lease in leased.leases]
                    self._leases.update((one.lease.lease_id, one) for one in taken)
                    self._held.extend(taken)
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
            if not self._leases:
                # A group larger than the node's concurrency runs by itself.
                return -(-batch // self._config.rollout.nodes) if self._in_step else max(room, 1)
            if room >= 1 and not self._in_step:
                return room
            self._changed.clear()
            await self._changed.wait()

    def _begin(self) -> None:
        """Begins the leases that are held, as far as there are places."""
        samples: list[Sample] = []
        while self._held and not self._draining:
            size = len(self._held[0].open)
            fits = self._unfinished + size <= self._concurrency
            if not (fits or self._in_step or self._unfinished == 0):
                break
            begun = self._held.popleft()
            begun.since = time.time()
            self._owners.update(dict.fromkeys(begun.open, begun))
            samples += begun.open.values()
            # Before they run: the next request asks for what these leave.
            self._count(size)
        if samples:
            # As one call of the workflow, which tells of each sample as it ends.
            self._rollouts.create_task(self._workflow.run(samples, self._take))

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

    async def _take(self, event: Event) -> None:
        """What became of a sample; a failure ends the attempt of its whole group."""
        name = event.sample.sample_id
        leased = self._owners[name]
        if isinstance(event, Generated):
            self._count(-1)
            self._begin()
            return
        try:
            if isinstance(event, Failed):
                await self._give_up(leased, event)
            elif isinstance(event, Interrupted):
                leased.interrupted = True
                if event.partial is not None:
                    leased.partials.append(event.partial)
            elif not leased.ended:
                await self._push(leased, event.trajectory)
        finally:
            del self._owners[name], leased.open[name]
            if not leased.open:
                task = leased.lease.task.task_id
                TRACES.span(task, "roll out", leased.since, tokens=leased.tokens)
                self._leases.pop(leased.lease.lease_id, None)
                self._changed.set()

    async def _push(self, leased: _Leased, trajectory: Trajectory) -> None:
        leased.tokens += trajectory.trained_tokens
        _TOKENS.inc(trajectory.trained_tokens)
        result = await self._queue.push(leased.lease.lease_id, [trajectory])
        for refusal in result.refused:
            log.error(
                "trajectory refused", trajectory=refusal.trajectory_id, reason=refusal.message
            )

    async def _give_up(self, leased: _Leased, failure: Failed) -> None:
        if leased.ended:
            return
        leased.ended = True
        task_id = leased.lease.task.task_id
        log.warning("rollout failed", task=task_id, kind=failure.kind.name, reason=failure.reason)
        await self._queue.fail(leased.lease.lease_id, failure.kind, failure.reason)
        await self._workflow.abort(list(leased.open))

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
                progress=self._progress(),
                waiting=self._waits.current(),
                load=min(1.0, self._unfinished / self._concurrency),
            )
            for lease_id in lost:
                leased = self._leases.get(lease_id)
                if leased is not None:
                    await self._lose(leased)

    def _progress(self) -> dict[str, int]:
        """Tokens by lease; one that waits for a place gets on as those do that have one."""
        tokens = {
            name: leased.tokens + self._workflow.progress(leased.open)
            for name, leased in self._leases.items()
        }
        waiting = [held.lease.lease_id for held in self._held]
        return tokens | dict.fromkeys(waiting, sum(tokens.values()))

    async def _lose(self, leased: _Leased) -> None:
        """The queue has given a lease to others."""
        log.warning("lease lost", task=leased.lease.task.task_id)
        if leased in self._held:
            self._held.remove(leased)
            del self._leases[leased.lease.lease_id]
            self._changed.set()
        else:
            leased.ended = True
            await self._workflow.abort(list(leased.open))

    async def _drain(self, leasing: asyncio.Task[None]) -> None:
        """Aborts what runs and returns its partial generations, within `drain_seconds`."""
        self._draining = True
        HEALTH.set_ready("draining")
        self._changed.set()
        leases = [leased for leased in self._leases.values() if not leased.ended]
        log.info("draining", leases=len(leases))
        try:
            async with asyncio.timeout(self._config.rollout.drain_seconds):
                await self._workflow.abort([name for each in leases for name in list(each.open)])
                for held in self._held:
                    await self._queue.give_back(held.lease.lease_id)
                await asyncio.wait({leasing})
                for leased in leases:
                    if leased.interrupted:
                        await self._queue.give_back(leased.lease.lease_id, leased.partials)
        except TimeoutError:
            log.warning("drain deadline reached; leases will expire")
            leasing.cancel()


def _samples(lease: Lease) -> dict[str, Sample]:
    """Those of the group that are not in the queue already, by their ids."""
    partials = {partial.index: partial for partial in lease.partials}
    names = {index: f"{lease.lease_id}/{index}" for index in range(lease.task.group_size)}
    return {
        name: Sample(name, lease.task, index, partials.get(index))
        for index, name in names.items()
        if index not in lease.done
    }
