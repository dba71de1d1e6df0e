"""Simulated rollout nodes on a real queue."""

from __future__ import annotations

import asyncio
import math
import random
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import numpy as np
import structlog

from leeway import rpc
from leeway.config import Config
from leeway.errors import InfrastructureError
from leeway.trajectory import FinishReason, Task, Trajectory
from leeway.versions import spans_of
from trajectory_queue.client import FailureKind, Lease, OperatorQueue, RolloutQueue
from trajectory_queue.plan.workload import Work
from trajectory_queue.simulated.pace import PROMPT_TOKENS, Pace, tokens_of

log = structlog.get_logger(__name__)

_LEASE_WAIT_SECONDS = 2.0
_POLICY_POLL_SECONDS = 0.05
# Between two looks at the clock, and at the weights, a sample goes on for so long.
_TICK_SECONDS = 0.04


class Policy:
    """The version of the weights in place, as the queue knows it; stands for the broadcast."""

    def __init__(self, queue: OperatorQueue) -> None:
        self._queue = queue
        self.version = 0

    async def follow(self) -> None:
        """Runs for ever."""
        while True:
            with suppress(InfrastructureError):
                self.version = (await self._queue.status()).version
            await asyncio.sleep(_POLICY_POLL_SECONDS)


@dataclass(slots=True)
class _Held:
    """A lease, the version of each token of its samples so far, and which of them go on."""

    lease: Lease
    versions: dict[int, list[int]] = field(init=False)
    open: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = {p.index: p.token_versions().tolist() for p in self.lease.partials}
        self.open = set(range(self.lease.task.group_size)) - self.lease.done


class _SampleFailed(Exception):  # noqa: N818 - a sample's end
    """As the profile says."""


class Node:
    """One simulated rollout node."""

    def __init__(
        self, queue: RolloutQueue, node_id: str, policy: Policy, pace: Pace, config: Config
    ) -> None:
        self._queue = queue
        self._node_id = node_id
        self._policy = policy
        self._pace = pace
        self._size = config.queued_group_size
        self._concurrency = max(config.rollout.most_concurrency, self._size)
        self._only_idle = config.staleness.first_budget == 0
        self._heartbeat_seconds = config.rollout.heartbeat_seconds
        self._running: dict[str, asyncio.Task[None]] = {}
        self._held: dict[str, _Held] = {}
        self._room = asyncio.Event()
        self._decoding = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set or the run is finished; gives back what it holds.

        Raises what the queue refuses for good: a lease that nobody works on must not be kept.
        """
        async with asyncio.TaskGroup() as rollouts:
            leasing = asyncio.create_task(self._lease(rollouts))
            beating = asyncio.create_task(self._beat())
            stopping = asyncio.create_task(stop.wait())
            working = {leasing, beating, stopping}
            try:
                await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in working:
                    task.cancel()
                await self._drain()
            for task in (leasing, beating):
                if task.done() and not task.cancelled():
                    task.result()

    async def _lease(self, rollouts: asyncio.TaskGroup) -> None:
        while True:
            unfinished = sum(len(held.open) for held in self._held.values())
            room = (self._concurrency - unfinished) // self._size
            if room <= 0 or (self._only_idle and self._running):
                self._room.clear()
                await self._room.wait()
                continue
            try:
                leased = await self._queue.lease_tasks(
                    version=self._policy.version,
                    max_groups=room,
                    wait_seconds=_LEASE_WAIT_SECONDS,
                    request_id=uuid.uuid4().hex,
                )
            except InfrastructureError as error:
                log.warning("no tasks", node=self._node_id, reason=str(error))
                continue
            if leased.run_finished:
                return
            for lease in leased.leases:
                held = self._held[lease.lease_id] = _Held(lease)
                self._running[lease.lease_id] = rollouts.create_task(self._roll_out(held))
            if leased.needs_version is not None:
                await asyncio.sleep(_POLICY_POLL_SECONDS)

    async def _roll_out(self, held: _Held) -> None:
        lease = held.lease
        try:
            async with asyncio.TaskGroup() as samples:
                for index in sorted(held.open):
                    samples.create_task(self._sample(held, index))
        except* InfrastructureError as group:
            log.warning("lease abandoned", node=self._node_id, reason=str(group.exceptions[0]))
        except* _SampleFailed:
            # A queue that stays away lets the lease expire.
            with suppress(InfrastructureError):
                await self._queue.fail(lease.lease_id, FailureKind.REWARD, "simulated failure")
        finally:
            self._running.pop(lease.lease_id, None)
            self._room.set()
        self._held.pop(lease.lease_id, None)

    async def _sample(self, held: _Held, index: int) -> None:
        lease = held.lease
        started = time.monotonic()
        work = self._pace.work(lease.task, index)
        versions = held.versions.setdefault(index, [])
        await self._generate(versions, work)
        seconds = time.monotonic() - started
        held.open.discard(index)
        self._room.set()
        if work.fails and lease.attempt == 1:
            raise _SampleFailed
        finished = self._trajectory(lease.task, index, versions, seconds, finished=True)
        result = await self._queue.push(lease.lease_id, [finished])
        for refusal in result.refused:
            log.warning("trajectory refused", node=self._node_id, reason=refusal.message)
        del held.versions[index]

    async def _generate(self, versions: list[int], work: Work) -> None:
        """Appends the version of each token. Late ticks are made up for: the whole takes as long as
        planned."""
        due, planned = time.monotonic(), 0.0
        for part in work.parts:
            left = min(1.0, max(0.0, planned + part.tokens - len(versions)) / part.tokens)
            planned += part.tokens
            if left == 0.0:
                continue
            due += part.away_seconds
            await asyncio.sleep(due - time.monotonic())
            ticks = max(1, math.ceil(left * part.decode_seconds / _TICK_SECONDS))
            self._decoding += 1
            try:
                for tick in range(ticks, 0, -1):
                    slower = 1.0 + self._pace.slowdown * (self._decoding - 1)
                    due += left * part.decode_seconds / ticks * slower
                    await asyncio.sleep(due - time.monotonic())
                    made = round(planned - part.tokens * left * (tick - 1) / ticks)
                    versions.extend([self._policy.version] * (max(1, made) - len(versions)))
            finally:
                self._decoding -= 1

    def _trajectory(
        self,
        task: Task,
        index: int,
        versions: Sequence[int],
        seconds: float = 0.0,
        *,
        finished: bool,
    ) -> Trajectory:
        count = len(versions)
        score = random.Random(task.seed * 31 + index).randrange(4) / 4 if finished else None
        return Trajectory(
            trajectory_id=f"{task.task_id}/{index}",
            task_id=task.task_id,
            index=index,
            token_ids=tokens_of(task, index, count),
            prompt_length=PROMPT_TOKENS,
            logprobs=np.full(count, -1.0, dtype=np.float32),
            loss_mask=np.ones(count, dtype=np.bool_),
            versions=spans_of(list(versions)),
            finish_reason=FinishReason.STOP if finished else FinishReason.UNFINISHED,
            sampling=task.sampling,
            reward=score,
            score=score,
            node_id=self._node_id,
            generation_seconds=seconds,
        )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            with suppress(InfrastructureError):
                lost = await self._queue.extend(
                    version=self._policy.version,
                    progress={
                        lease_id: sum(len(versions) for versions in held.versions.values())
                        for lease_id, held in self._held.items()
                    },
                )
                for lease_id in lost:
                    if lease_id in self._running:
                        self._running[lease_id].cancel()
                        self._held.pop(lease_id, None)

    async def _drain(self) -> None:
        running = dict(self._running)
        for task in running.values():
            task.cancel()
        if running:
            await asyncio.wait(running.values())
        for lease_id in running:
            held = self._held[lease_id]
            partials = [
                self._trajectory(held.lease.task, index, versions, finished=False)
                for index, versions in held.versions.items()
                if versions
            ]
            with suppress(InfrastructureError):
                await self._queue.give_back(lease_id, partials)


async def run_fleet(
    config: Config,
    nodes: int,
    name: str,
    pace: Pace,
    stop: asyncio.Event,
    dial: Callable[[grpc.aio.Channel, str], RolloutQueue] = RolloutQueue,
) -> None:
    """Many nodes in one process, until the run is finished or `stop` is set.

    Args:
        dial: Makes a node's client; a test may put faults into it.
    """
    async with rpc.connect(config.queue.address, config.security) as channel:
        policy = Policy(OperatorQueue(channel, name))
        following = asyncio.create_task(policy.follow())
        try:
            async with asyncio.TaskGroup() as running:
                for number in range(nodes):
                    node_id = f"{name}-{number}"
                    node = Node(dial(channel, node_id), node_id, policy, pace, config)
                    running.create_task(node.run(stop))
        finally:
            following.cancel()
