"""The rollout node: lease, generate, score, push.

One node runs supervised loops: it leases tasks while the engine has room, rolls each lease out,
keeps its leases alive with heartbeats, and receives new policies. A failure of one trajectory costs
its group one attempt and nothing else; a failure of a loop ends the node with its reason.

On `stop` the node drains: it leases nothing more, aborts what runs, returns the partial generations
to the queue for other nodes to continue, and ends.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog
import xxhash

from leeway.config import Config
from leeway.errors import DataError, EngineError, InfrastructureError, LeewayError, RewardError
from leeway.telemetry import Spans, Waits
from leeway.trajectory import FinishReason, Int32Array, Task, Trajectory
from rollout_service.engines.base import Engine, GenerateRequest, Generation
from rollout_service.prompts import Renderer
from rollout_service.receiver import PolicyReceiver
from rollout_service.rewards import RewardPool
from trajectory_queue.client import FailureKind, Lease, RolloutQueue

log = structlog.get_logger(__name__)

# Long enough that an idle node costs the queue little, short enough to notice `stop` in time.
_LEASE_WAIT_SECONDS = 2.0


@dataclass(slots=True)
class _Running:
    """A lease that this node is rolling out."""

    lease: Lease
    prompt: Int32Array
    open: dict[str, int] = field(default_factory=dict)
    """Index of every sample that is not finished, by its request's id."""
    partials: list[Trajectory] = field(default_factory=list)
    interrupted: bool = False
    """Some of its samples were aborted: it must be given back."""
    ended: bool = False
    """Failed, lost or returned: what still arrives for it is dropped."""
    tokens: int = 0


class RolloutNode:
    """Wires an engine to the queue; see the module's docstring."""

    def __init__(
        self,
        config: Config,
        node_id: str,
        engine: Engine,
        queue: RolloutQueue,
        receiver: PolicyReceiver,
        rewards: RewardPool,
        renderer: Renderer,
        spans: Spans,
    ) -> None:
        self._config = config
        self._node_id = node_id
        self._engine = engine
        self._queue = queue
        self._receiver = receiver
        self._rewards = rewards
        self._renderer = renderer
        self._spans = spans
        self._waits = Waits()
        self._running: dict[str, _Running] = {}
        self._unfinished = 0
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
        async with asyncio.TaskGroup() as rollouts:
            while not self._draining:
                groups = await self._room()
                leased = await self._queue.lease_tasks(
                    version=self._engine.version,
                    max_groups=groups,
                    wait_seconds=_LEASE_WAIT_SECONDS,
                    request_id=uuid.uuid4().hex,
                )
                if leased.run_finished:
                    return
                if leased.leases:
                    rollouts.create_task(self._roll_out(leased.leases))
                elif leased.needs_version is not None:
                    with self._waits.waiting_for("weights", f"version {leased.needs_version}"):
                        await self._await_version(leased.needs_version)

    async def _room(self) -> int:
        """Waits until another group fits, and says how many do.

        With a budget of 0 the node leases only when idle: then a batch is one call to the engine,
        and the run is reproducible bit by bit.
        """
        size = self._config.queued_group_size
        while True:
            room = (self._config.rollout.concurrency - self._unfinished) // size
            if self._unfinished == 0 and not self._running:
                return max(room, self._config.queued_batch_groups)
            if room >= 1 and self._config.staleness.budget > 0:
                return room
            self._changed.clear()
            await self._changed.wait()

    async def _await_version(self, version: int) -> None:
        try:
            await self._receiver.wait_for(version, _LEASE_WAIT_SECONDS)
        except InfrastructureError:
            return  # The queue is asked again: it may need another version by now.

    # Rolling out --------------------------------------------------------------------------------

    async def _roll_out(self, leases: Sequence[Lease]) -> None:
        """Rolls the leases out as one submission to the engine; scores and pushes each sample."""
        if not await self._hold_version(leases):
            return
        requests: list[GenerateRequest] = []
        owner: dict[str, _Running] = {}
        for lease in leases:
            try:
                prompt = self._renderer.render(lease.task.messages)
                running = _Running(lease, prompt)
                new = self._requests(running)
                for request in new:
                    self._engine.check(request)
            except (DataError, EngineError) as error:
                log.warning("task refused", task=lease.task.task_id, reason=str(error))
                await self._queue.fail(lease.lease_id, FailureKind.DATA, str(error))
                continue
            self._running[lease.lease_id] = running
            requests.extend(new)
        owner = {
            request_id: running for running in self._running.values() for request_id in running.open
        }
        self._count(len(requests))
        async with asyncio.TaskGroup() as finishing:
            async for generation in self._engine.generate(requests):
                self._count(-1)
                finishing.create_task(self._finish(owner[generation.request_id], generation))

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

    def _requests(self, running: _Running) -> list[GenerateRequest]:
        task = running.lease.task
        partials = {partial.index: partial for partial in running.lease.partials}
        requests = []
        for index in range(task.group_size):
            if index in running.lease.done:
                continue
            request_id = f"{running.lease.lease_id}/{index}"
            running.open[request_id] = index
            resume = partials.get(index)
            requests.append(
                GenerateRequest(
                    request_id=request_id,
                    prompt=running.prompt,
                    sampling=task.sampling,
                    seed=sample_seed(task, index),
                    resume=_generation_of(resume, request_id) if resume is not None else None,
                )
            )
        return requests

    async def _finish(self, running: _Running, generation: Generation) -> None:
        """Scores and pushes one sample; a failure ends the attempt of its whole group."""
        index = running.open.pop(generation.request_id)
        lease = running.lease
        try:
            if running.ended:
                return
            trajectory = self._trajectory(running, index, generation)
            if generation.finish_reason is FinishReason.UNFINISHED:
                running.interrupted = True
                if generation.token_ids.size:
                    running.partials.append(trajectory)
                return
            try:
                score = await self._rewards.score(
                    self._renderer.text(generation.token_ids), lease.task.columns
                )
            except (RewardError, InfrastructureError) as error:
                kind = (
                    FailureKind.REWARD
                    if isinstance(error, RewardError)
                    else FailureKind.INFRASTRUCTURE
                )
                await self._give_up(running, kind, error)
                return
            result = await self._queue.push(lease.lease_id, [trajectory.scored(score)])
            for refusal in result.refused:
                log.error(
                    "trajectory refused", trajectory=refusal.trajectory_id, reason=refusal.message
                )
        finally:
            if not running.open:
                self._running.pop(lease.lease_id, None)
                self._changed.set()

    async def _give_up(self, running: _Running, kind: FailureKind, error: LeewayError) -> None:
        if running.ended:
            return
        running.ended = True
        task_id = running.lease.task.task_id
        log.warning("rollout failed", task=task_id, kind=kind.name, reason=str(error))
        await self._queue.fail(running.lease.lease_id, kind, str(error))
        await self._engine.abort(list(running.open))

    def _trajectory(self, running: _Running, index: int, generation: Generation) -> Trajectory:
        task = running.lease.task
        running.tokens += generation.token_ids.size
        return Trajectory(
            trajectory_id=f"{task.task_id}/{index}",
            task_id=task.task_id,
            index=index,
            token_ids=np.concatenate([running.prompt, generation.token_ids]),
            prompt_length=running.prompt.size,
            logprobs=generation.logprobs,
            loss_mask=np.ones(generation.token_ids.size, dtype=np.bool_),
            versions=generation.versions,
            finish_reason=generation.finish_reason,
            sampling=task.sampling,
            node_id=self._node_id,
            generation_seconds=generation.seconds,
        )

    def _count(self, change: int) -> None:
        """Keeps the number of unfinished samples, and the spans in which there were any."""
        if self._unfinished == 0 and change > 0:
            self._busy_since = time.time()
        self._unfinished += change
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
                progress={lease_id: run.tokens for lease_id, run in self._running.items()},
                waiting=self._waits.current(),
            )
            for lease_id in lost:
                running = self._running.get(lease_id)
                if running is not None:
                    log.warning("lease lost", task=running.lease.task.task_id)
                    running.ended = True
                    await self._engine.abort(list(running.open))

    async def _drain(self, leasing: asyncio.Task[None]) -> None:
        """Aborts what runs and returns its partial generations, within `drain_seconds`."""
        self._draining = True
        self._changed.set()
        leases = [running for running in self._running.values() if not running.ended]
        log.info("draining", leases=len(leases))
        try:
            async with asyncio.timeout(self._config.rollout.drain_seconds):
                await self._engine.abort([name for run in leases for name in list(run.open)])
                await asyncio.wait({leasing})
                for running in leases:
                    if running.interrupted:
                        await self._queue.give_back(running.lease.lease_id, running.partials)
        except TimeoutError:
            log.warning("drain deadline reached; leases will expire")
            leasing.cancel()


def sample_seed(task: Task, index: int) -> int:
    """The seed of one sample: a function of the task's seed and the sample's index."""
    return xxhash.xxh3_64_intdigest(f"{task.seed}/{index}".encode())


def _generation_of(partial: Trajectory, request_id: str) -> Generation:
    return Generation(
        request_id=request_id,
        token_ids=partial.token_ids[partial.prompt_length :],
        logprobs=partial.logprobs,
        versions=partial.versions,
        finish_reason=FinishReason.UNFINISHED,
        seconds=partial.generation_seconds,
    )
