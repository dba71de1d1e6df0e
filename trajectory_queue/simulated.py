"""A rollout fleet and a trainer without a model, for trying the queue at any scale on one machine.

Samples take the time that a distribution says and hold tokens that follow from the task's seed, so
that a trainer can tell whether what it gets is what was made. Everything else is real: the nodes
lease, extend, push, give back and fail through the same client as a real node, take new weights in
the middle of a sample, and the trainer resumes, leases, commits and checkpoints like a real one.

The trainer's checkpoint is its weights: the tasks that it has been trained on, by version. What a
killed trainer had learned since its last checkpoint is gone, as it would be.

    python -m trajectory_queue.simulated fleet CONFIG [--nodes 100] [--name a]
    python -m trajectory_queue.simulated trainer CONFIG [--tasks 1000] [--step-seconds 0.5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
import numpy as np
import structlog

from leeway import config as configuration
from leeway import rpc
from leeway.config import Config
from leeway.errors import DeadlineError, InfrastructureError
from leeway.trajectory import FinishReason, Int32Array, Sampling, Task, Trajectory
from leeway.versions import spans_of
from trajectory_queue.client import (
    Batch,
    FailureKind,
    Lease,
    OperatorQueue,
    RolloutQueue,
    TrainerQueue,
)

log = structlog.get_logger(__name__)

_PROMPT_TOKENS = 8
_VOCABULARY = 32_000
_LEASE_WAIT_SECONDS = 2.0
_POLICY_POLL_SECONDS = 0.05
# Tokens of a sample that are generated between two looks at the clock.
_TOKENS_A_TICK = 4


@dataclass(frozen=True, slots=True)
class Speed:
    """How long samples are and how fast they are made."""

    median_tokens: int = 24
    sigma: float = 0.5
    tokens_per_second: float = 100.0
    slow_share: float = 0.03
    """Of tasks, by seed; their samples take `slow_factor` times as long."""
    slow_factor: float = 6.0
    failure_share: float = 0.0
    """Of samples whose reward function fails at the first attempt."""

    def is_slow(self, task: Task) -> bool:
        return random.Random(task.seed).random() < self.slow_share

    def tokens(self, task: Task, index: int) -> int:
        drawn = random.Random(task.seed * 1000 + index).lognormvariate(0.0, self.sigma)
        return max(1, min(int(self.median_tokens * drawn), task.sampling.max_new_tokens))

    def pause(self, task: Task) -> float:
        """Seconds for `_TOKENS_A_TICK` tokens."""
        factor = self.slow_factor if self.is_slow(task) else 1.0
        return _TOKENS_A_TICK / self.tokens_per_second * factor


def make_task(sequence: int, config: Config) -> Task:
    """A function of its position, like a real sampler's."""
    return Task(
        task_id=f"{config.run.name}-{sequence:08d}",
        sequence=sequence,
        messages=({"role": "user", "content": f"task {sequence}"},),
        columns={},
        group_size=config.queued_group_size,
        sampling=Sampling(
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            top_k=config.sampling.top_k,
            max_new_tokens=config.sampling.max_new_tokens,
        ),
        seed=config.run.seed * 1_000_003 + sequence,
    )


def tokens_of(task: Task, index: int, count: int) -> Int32Array:
    """The first `count` tokens, prompt included, of one sample: what any node makes of it."""
    generator = np.random.default_rng([task.seed, index])
    return generator.integers(0, _VOCABULARY, _PROMPT_TOKENS + count).astype(np.int32)


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


class Node:
    """One simulated rollout node."""

    def __init__(
        self, queue: RolloutQueue, node_id: str, policy: Policy, speed: Speed, config: Config
    ) -> None:
        self._queue = queue
        self._node_id = node_id
        self._policy = policy
        self._speed = speed
        self._groups = max(1, config.rollout.concurrency // config.queued_group_size)
        self._heartbeat_seconds = config.rollout.heartbeat_seconds
        self._running: dict[str, asyncio.Task[None]] = {}
        self._partials: dict[str, dict[int, Trajectory]] = {}
        self._room = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set or the run is finished; gives back what it holds."""
        leasing = asyncio.create_task(self._lease())
        beating = asyncio.create_task(self._beat())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({leasing, beating, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (leasing, beating, stopping):
                task.cancel()
            await self._drain()
        for task in (leasing, beating):
            if task.done() and not task.cancelled():
                task.result()

    async def _lease(self) -> None:
        while True:
            room = self._groups - len(self._running)
            if room <= 0:
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
                self._running[lease.lease_id] = asyncio.create_task(self._roll_out(lease))
            if leased.needs_version is not None:
                await asyncio.sleep(_POLICY_POLL_SECONDS)

    async def _roll_out(self, lease: Lease) -> None:
        self._partials[lease.lease_id] = {partial.index: partial for partial in lease.partials}
        try:
            async with asyncio.TaskGroup() as samples:
                for index in range(lease.task.group_size):
                    if index not in lease.done:
                        samples.create_task(self._sample(lease, index))
        except* InfrastructureError as group:
            log.warning("lease abandoned", node=self._node_id, reason=str(group.exceptions[0]))
        finally:
            self._running.pop(lease.lease_id, None)
            self._room.set()
        self._partials.pop(lease.lease_id, None)

    async def _sample(self, lease: Lease, index: int) -> None:
        task, partials = lease.task, self._partials[lease.lease_id]
        wanted = self._speed.tokens(task, index)
        before = partials.get(index)
        versions = before.token_versions().tolist() if before is not None else []
        while len(versions) < wanted:
            await asyncio.sleep(self._speed.pause(task))
            made = min(_TOKENS_A_TICK, wanted - len(versions))
            versions.extend([self._policy.version] * made)
            partials[index] = self._trajectory(task, index, versions, finished=False)
        failing = random.Random(task.seed * 7919 + index).random() < self._speed.failure_share
        if failing and lease.attempt == 1:
            await self._queue.fail(lease.lease_id, FailureKind.REWARD, "simulated failure")
            return
        finished = self._trajectory(task, index, versions, finished=True)
        result = await self._queue.push(lease.lease_id, [finished])
        for refusal in result.refused:
            log.warning("trajectory refused", node=self._node_id, reason=refusal.message)
        partials.pop(index, None)

    def _trajectory(
        self, task: Task, index: int, versions: Sequence[int], *, finished: bool
    ) -> Trajectory:
        count = len(versions)
        score = random.Random(task.seed * 31 + index).randrange(4) / 4 if finished else None
        return Trajectory(
            trajectory_id=f"{task.task_id}/{index}",
            task_id=task.task_id,
            index=index,
            token_ids=tokens_of(task, index, count),
            prompt_length=_PROMPT_TOKENS,
            logprobs=np.full(count, -1.0, dtype=np.float32),
            loss_mask=np.ones(count, dtype=np.bool_),
            versions=spans_of(list(versions)),
            finish_reason=FinishReason.STOP if finished else FinishReason.UNFINISHED,
            sampling=task.sampling,
            reward=score,
            score=score,
            node_id=self._node_id,
            generation_seconds=count / self._speed.tokens_per_second,
        )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            with suppress(InfrastructureError):
                lost = await self._queue.extend(
                    version=self._policy.version,
                    progress={
                        lease_id: sum(t.response_length for t in partials.values())
                        for lease_id, partials in self._partials.items()
                    },
                )
                for lease_id in lost:
                    if lease_id in self._running:
                        self._running[lease_id].cancel()

    async def _drain(self) -> None:
        running = dict(self._running)
        for task in running.values():
            task.cancel()
        if running:
            await asyncio.wait(running.values())
        for lease_id in running:
            partials = list(self._partials.pop(lease_id, {}).values())
            with suppress(InfrastructureError):
                await self._queue.give_back(lease_id, partials)


async def run_fleet(
    config: Config,
    nodes: int,
    name: str,
    speed: Speed,
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
                    node = Node(dial(channel, node_id), node_id, policy, speed, config)
                    running.create_task(node.run(stop))
        finally:
            following.cancel()


@dataclass(slots=True)
class Learned:
    """A simulated trainer's weights: all that it has been trained on."""

    version: int = 0
    position: int = 0
    """Of the sampler: the next task to enqueue."""
    steps: list[tuple[int, list[str]]] = field(default_factory=list)
    """(version reached, tasks trained on to reach it)."""
    tokens_trained: int = 0
    tokens_masked: int = 0
    over_budget: int = 0
    """Trajectories that held a trainable token older than the budget allows."""
    corrupt: int = 0
    """Trajectories that were not what the fleet made."""
    slow_groups: int = 0

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self)))
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> Learned:
        return cls(**json.loads(path.read_text())) if path.exists() else cls()


class SimulatedTrainer:
    """Trains on all tasks of a run, a batch after the other; a step takes `step_seconds`."""

    def __init__(
        self,
        queue: TrainerQueue,
        config: Config,
        directory: Path,
        *,
        tasks: Callable[[], int],
        step_seconds: float,
        speed: Speed,
    ) -> None:
        """`tasks` says how many there are; it may change while the run lasts."""
        self._queue = queue
        self._config = config
        self._path = directory / "learned.json"
        self._tasks = tasks
        self._step_seconds = step_seconds
        self._speed = speed
        self.learned = Learned()

    async def run(self) -> Learned:
        """Begins at the last checkpoint; returns when every task has ended."""
        self.learned = Learned.load(self._path)
        await self._queue.resume(self.learned.version)
        while await self._feed():
            batch = await self._lease()
            if batch is None:
                continue
            await asyncio.sleep(self._step_seconds)
            self._learn(batch)
            await self._queue.commit(batch, version=self.learned.version)
            if self.learned.version % self._config.trainer.checkpoint_every == 0:
                await self._checkpoint()
        await self._checkpoint()
        await self._queue.drain()
        return self.learned

    async def _feed(self) -> int:
        """Keeps tasks waiting; returns how many groups are still to come."""
        batch = self._config.queued_batch_groups
        status = await self._queue.status()
        wanted = 2 * (status.budget + 1) * batch - status.groups["waiting"]
        last = max(
            self.learned.position,
            min(self._tasks(), self.learned.position + max(0, wanted)),
        )
        fresh = [make_task(n, self._config) for n in range(self.learned.position, last)]
        if fresh:
            await self._queue.enqueue(fresh)
            self.learned.position = last
            status = await self._queue.status()
        return sum(status.groups[state] for state in ("waiting", "running", "queued", "leased"))

    async def _lease(self) -> Batch | None:
        """A batch; a smaller one when fewer groups are left; None when that has changed."""
        left = await self._feed()
        if not left:
            return None
        try:
            return await self._queue.lease_batch(
                version=self.learned.version,
                groups=min(self._config.queued_batch_groups, left),
                deadline_seconds=self._config.trainer.batch_seconds,
            )
        except DeadlineError as error:
            log.warning("no batch yet", reason=str(error))
            return None

    def _learn(self, batch: Batch) -> None:
        learned = self.learned
        oldest = learned.version - batch.budget
        for group in batch.groups:
            learned.slow_groups += self._speed.is_slow(group.task)
            for trajectory in group.trajectories:
                made = tokens_of(group.task, trajectory.index, trajectory.response_length)
                learned.corrupt += not np.array_equal(made, trajectory.token_ids)
                learned.tokens_trained += trajectory.trained_tokens
                versions = trajectory.version_range()
                learned.over_budget += versions is not None and versions[0] < oldest
        learned.tokens_masked += batch.masked_tokens
        learned.version += 1
        learned.steps.append((learned.version, [group.task.task_id for group in batch.groups]))

    async def _checkpoint(self) -> None:
        self.learned.save(self._path)
        await self._queue.checkpointed(self.learned.version)


async def run_trainer(
    config: Config, *, tasks: Callable[[], int], step_seconds: float, speed: Speed
) -> Learned:
    """Trains on so many tasks; its checkpoint lies in the run's directory."""
    config.run.path.mkdir(parents=True, exist_ok=True)
    address, limit = config.queue.address, config.queue.max_message_bytes
    async with rpc.connect(address, config.security, limit) as channel:
        trainer = SimulatedTrainer(
            TrainerQueue(channel, "trainer"),
            config,
            config.run.path,
            tasks=tasks,
            step_seconds=step_seconds,
            speed=speed,
        )
        return await trainer.run()


async def _main(arguments: argparse.Namespace) -> None:
    config = configuration.load(arguments.config)
    speed = Speed(tokens_per_second=arguments.tokens_per_second)
    if arguments.side == "trainer":
        learned = await run_trainer(
            config,
            tasks=lambda: int(arguments.tasks),
            step_seconds=arguments.step_seconds,
            speed=speed,
        )
        print(json.dumps({"versions": learned.version, "over_budget": learned.over_budget}))
        return
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await run_fleet(config, arguments.nodes, arguments.name, speed, stop)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["fleet", "trainer"])
    parser.add_argument("config", type=Path)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--name", default="simulated")
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--step-seconds", type=float, default=0.5)
    parser.add_argument("--tokens-per-second", type=float, default=100.0)
    asyncio.run(_main(parser.parse_args()))
