"""What a group costs on its way through the queue, beside raw Redis and other systems' queues.

    OMP_NUM_THREADS=1 python benchmarks/queue.py [--short] [--peers DIR]

CPU-milliseconds of all processes (node and trainer, here one; the queue service; its Redis), for
groups of 4 x 1,024 and 4 x 8,192 tokens with log-probabilities, masks and versions, on a server
with its append-only file on. The sides take turns, a few batches each; a key compares medians.

ratio_to_redis_1024, ratio_to_redis_8192: put + lease + commit of ours, from a `Trajectory` in the
    node to a validated `Group` in the trainer, over the same payload bytes through redis-py: XADD,
    XREADGROUP, XACK, XDEL, pipelined in equal batches.
bare_to_redis_1024, bare_to_redis_8192: the same bytes by the same calls through a service that does
    nothing but that (`bare_queue.py`), over redis-py: what no queue of this shape goes below.
ratio_to_atropos: our put + lease + commit over the Atropos server's put + get of the same groups;
    null where its virtual environment (--peers DIR: DIR/atropos) is missing.
ratio_to_transferqueue: the same over TransferQueue's put + get + clear (DIR/transfer); it keeps
    what it holds in memory alone.
depth_growth: cost of a group with 100,000 groups queued over the cost with 100.
rss_growth_mb, loop_lag_ms_max: of the service while 100,000 groups pass.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import redis
import yaml

from benchmarks.common import finish
from leeway import rpc
from leeway.config import SecurityConfig
from leeway.local import free_addresses
from leeway.process import keep_freed_memory
from leeway.trajectory import FinishReason, Sampling, Task, Trajectory
from leeway.v1 import queue_pb2 as pb
from leeway.v1 import queue_pb2_grpc
from leeway.versions import VersionSpan
from trajectory_queue.client import RolloutQueue, TrainerQueue
from trajectory_queue.embedded import embedded, server_binary

GROUP_SIZE = 4
BATCH = 64
# Groups in one push, one pipeline.
CHUNK = 16
CHECKPOINT_EVERY = 8
SAMPLING = Sampling(max_new_tokens=16384)


class Clock:
    """CPU-milliseconds of this process, others, and their children."""

    def __init__(self, *pids: int) -> None:
        others = [psutil.Process(pid) for pid in pids]
        self._others = [each for other in others for each in (other, *other.children())]
        self.spent = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """What is spent meanwhile is added to `spent`."""
        before = self._now()
        yield
        self.spent += self._now() - before

    def _now(self) -> float:
        # Redis rewrites its append-only file in children of its own.
        others = sum(
            times.user + times.system + times.children_user + times.children_system
            for times in (process.cpu_times() for process in self._others)
        )
        # This process's clock is finer than /proc's hundredths of a second.
        return 1000 * (time.process_time() + others)


class Service:
    """`leeway queue serve` in a process of its own."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.address, self._metrics = free_addresses(2)
        path = folder / "config.yaml"
        path.write_text(
            yaml.safe_dump(
                {
                    "run": {"name": f"bench-{budget}", "directory": str(folder)},
                    "model": {"path": "unused"},
                    "task": {"jsonl": "unused", "reward": "unused:unused"},
                    "sampling": {"group_size": GROUP_SIZE, "max_new_tokens": 16384},
                    "staleness": {"budget": budget},
                    "trainer": {"batch_groups": BATCH},
                    "queue": {
                        "address": self.address,
                        "filter_equal_scores": False,
                        "max_bytes": 16 << 30,
                    },
                    "telemetry": {"metrics_address": self._metrics, "log_level": "warning"},
                }
            )
        )
        command: list[str | Path] = [Path(sys.executable).parent / "leeway", "queue", "serve", path]
        environment = {k: v for k, v in os.environ.items() if k != "REDIS_URL"}
        self.process = subprocess.Popen(command, env=environment)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.process.terminate()
        self.process.wait()

    def rss_mb(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss) / 1e6

    def loop_lag_ms_max(self) -> float:
        with urllib.request.urlopen(f"http://{self._metrics}/metrics") as page:
            text = page.read().decode()
        found = re.search(r"^leeway_queue_loop_lag_max_seconds (\S+)$", text, re.MULTILINE)
        assert found is not None
        return 1000 * float(found.group(1))


class Queue:
    """Both sides of our queue, and what passes through."""

    def __init__(self, node: RolloutQueue, trainer: TrainerQueue, clock: Clock) -> None:
        self.node, self.trainer, self.clock = node, trainer, clock
        self.version = 0
        self._sequence = itertools.count()

    async def put(self, groups: int, tokens: int) -> None:
        """Enqueues tasks, leases them and pushes their trajectories."""
        tasks = [_task(next(self._sequence)) for _ in range(groups)]
        await self.trainer.enqueue(tasks)
        leased = await self.node.lease_tasks(
            version=self.version,
            max_groups=groups,
            wait_seconds=5.0,
            request_id=tasks[0].task_id,
        )
        assert len(leased.leases) == groups, leased.waiting_for
        made = [
            (lease.lease_id, trajectory)
            for lease in leased.leases
            for trajectory in _group(lease.task, tokens, self.version)
        ]
        with self.clock.running():
            for start in range(0, len(made), CHUNK * GROUP_SIZE):
                result = await self.node.push_many(made[start : start + CHUNK * GROUP_SIZE])
                assert not result.refused

    async def take(self, groups: int) -> None:
        """Leases one batch and commits it."""
        with self.clock.running():
            batch = await self.trainer.lease_batch(
                version=self.version, groups=groups, deadline_seconds=60
            )
            self.version += 1
            await self.trainer.commit(batch, version=self.version)
            if self.version % CHECKPOINT_EVERY == 0:
                await self.trainer.checkpointed(self.version)

    async def cost(self, batches: int, tokens: int) -> float:
        """CPU-ms a group of put + lease + commit."""
        before = self.clock.spent
        for _ in range(batches):
            await self.put(BATCH, tokens)
            await self.take(BATCH)
        return (self.clock.spent - before) / (batches * BATCH)


@contextlib.asynccontextmanager
async def queue(service: Service) -> AsyncIterator[Queue]:
    async with rpc.connect(service.address, SecurityConfig()) as channel:
        trainer = TrainerQueue(channel, "trainer")
        await trainer.resume(0)
        yield Queue(RolloutQueue(channel, "node"), trainer, Clock(service.process.pid))


class RawRedis:
    """The same bytes through redis-py alone, one stream entry a group."""

    def __init__(self, client: redis.Redis, clock: Clock, tokens: int) -> None:
        self._client, self._clock = client, clock
        self._payload = b"".join(_payloads(tokens))
        client.xgroup_create("raw", "readers", mkstream=True)

    async def cost(self, batches: int) -> float:
        """CPU-ms a group."""
        before = self._clock.spent
        with self._clock.running():
            for _ in range(batches):
                self._pass_batch()
        return (self._clock.spent - before) / (batches * BATCH)

    def _pass_batch(self) -> None:
        for _ in range(BATCH // CHUNK):
            pipe = self._client.pipeline(transaction=False)
            for _ in range(CHUNK):
                pipe.xadd("raw", {"b": self._payload})
            pipe.execute()
        ids: list[bytes] = []
        while len(ids) < BATCH:
            read: Any = self._client.xreadgroup("readers", "one", {"raw": ">"}, count=CHUNK)
            ids.extend(identifier for identifier, _ in read[0][1])
        self._client.xack("raw", "readers", *ids)
        self._client.xdel("raw", *ids)


class BareQueue:
    """The same bytes through `bare_queue.py`."""

    def __init__(self, channel: grpc.aio.Channel, clock: Clock, tokens: int) -> None:
        self._stub = queue_pb2_grpc.TrajectoryQueueStub(channel)
        self._clock = clock
        self._payloads = _payloads(tokens)

    async def cost(self, batches: int) -> float:
        """CPU-ms a group."""
        before = self._clock.spent
        with self._clock.running():
            for _ in range(batches):
                await self._pass_batch()
        return (self._clock.spent - before) / (batches * BATCH)

    async def _pass_batch(self) -> None:
        for _ in range(BATCH // CHUNK):
            pushed = [pb.PushedTrajectory(trajectory=each) for each in self._payloads] * CHUNK
            await self._stub.Push(pb.PushRequest(trajectories=pushed), timeout=60)
        taken, request = 0, pb.LeaseBatchRequest(groups=BATCH)
        async for message in self._stub.LeaseBatch(request, timeout=60):
            taken += sum(len(group.trajectories) for group in message.leased)
        assert taken == BATCH * GROUP_SIZE


@contextlib.asynccontextmanager
async def bare_queue(url: str, redis_pid: int, tokens: int) -> AsyncIterator[BareQueue]:
    (address,) = free_addresses(1)
    command = [sys.executable, "-m", "benchmarks.bare_queue", address, str(GROUP_SIZE)]
    environment = os.environ | {"REDIS_URL": url}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        service.stdout.readline()
        async with rpc.connect(address, SecurityConfig()) as channel:
            yield BareQueue(channel, Clock(service.pid, redis_pid), tokens)
        service.terminate()


async def costs(repeats: int, batches: int, tokens: int, folder: Path) -> dict[str, float]:
    """CPU-ms a group of "ours", "bare" and "raw": medians over the repeats.

    Each has some batches at a stretch, after one that is not counted: while the others had their
    turn, its memory went cold.
    """
    folder.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        service = stack.enter_context(Service(folder, budget=8))
        ours = await stack.enter_async_context(queue(service))
        url, pid = stack.enter_context(_redis(folder / "raw"))
        raw = RawRedis(stack.enter_context(redis.Redis.from_url(url)), Clock(pid), tokens)
        url, pid = stack.enter_context(_redis(folder / "bare"))
        bare = await stack.enter_async_context(bare_queue(url, pid, tokens))
        sides: dict[str, Callable[[int], Awaitable[float]]] = {
            "ours": partial(ours.cost, tokens=tokens),
            "bare": bare.cost,
            "raw": raw.cost,
        }
        seen: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(repeats):
            for name, cost in sides.items():
                await cost(1)
                seen[name].append(await cost(batches))
    for name, values in seen.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        shown = f"{middle:.3f} ({low:.3f} to {high:.3f})"
        print(f"{name}, {tokens} tokens, CPU-ms a group: {shown}", flush=True)
    return {name: statistics.median(values) for name, values in seen.items()}


@contextlib.contextmanager
def _redis(folder: Path) -> Iterator[tuple[str, int]]:
    """(address, process id) of a server such as the service's own."""
    own = psutil.Process()
    before = own.children()
    with embedded(server_binary(), folder) as url:
        (server,) = set(own.children()) - set(before)
        yield url, server.pid


async def depth_growth(deep: int, repeats: int, folder: Path) -> float:
    """Cost of a group with `deep` groups queued over the cost with 100."""
    folder.mkdir()
    shallow_depth = 100 // BATCH + 1
    with Service(folder, budget=deep // BATCH + 8) as service:
        async with queue(service) as side:
            for _ in range(shallow_depth):
                await side.put(BATCH, 64)
            await side.cost(4, 64)
            shallow = [await side.cost(8, 64) for _ in range(repeats)]
            for _ in range(deep // BATCH - shallow_depth):
                await side.put(BATCH, 64)
            await side.cost(4, 64)
            full = [await side.cost(8, 64) for _ in range(repeats)]
    return statistics.median(full) / statistics.median(shallow)


async def endurance(groups: int, folder: Path) -> tuple[float, float]:
    """(growth of the service's memory in MB, longest loop lag in ms) while `groups` pass."""
    folder.mkdir()
    with Service(folder, budget=8) as service:
        async with queue(service) as side:
            warm = max(8, groups // BATCH // 10)
            await side.cost(warm, 1024)
            before = service.rss_mb()
            await side.cost(groups // BATCH, 1024)
            return service.rss_mb() - before, service.loop_lag_ms_max()


def peer(peers: Path | None, name: str, tokens: int) -> float | None:
    """CPU-ms a group of another system's queue, put + get; None where it is not installed."""
    python = peers / name / "bin" / "python" if peers is not None else None
    if python is None or not python.exists():
        return None
    script = Path(__file__).parent / "peers" / f"{name}_peer.py"
    command: list[str | Path] = [python, script, str(GROUP_SIZE), str(tokens)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _task(sequence: int) -> Task:
    return Task(
        task_id=f"task-{sequence:08d}",
        sequence=sequence,
        messages=({"role": "user", "content": "How many primes are there below 100?"},),
        columns={"answer": "25"},
        group_size=GROUP_SIZE,
        sampling=SAMPLING,
        seed=sequence,
    )


def _group(task: Task, tokens: int, version: int) -> Sequence[Trajectory]:
    first = _trajectory(tokens)
    return [
        replace(
            first,
            trajectory_id=f"{task.task_id}/{index}",
            task_id=task.task_id,
            index=index,
            versions=(VersionSpan(version, tokens),),
            score=float(index),
            reward=float(index),
        )
        for index in range(task.group_size)
    ]


def _payloads(tokens: int) -> list[bytes]:
    """The trajectories of a group as they are sent."""
    group = _group(_task(0), tokens, version=0)
    return [trajectory.to_wire().SerializeToString() for trajectory in group]


def _trajectory(tokens: int) -> Trajectory:
    rng = np.random.default_rng(tokens)
    return Trajectory(
        trajectory_id="?",
        task_id="?",
        index=0,
        token_ids=rng.integers(0, 49152, tokens + 32).astype(np.int32),
        prompt_length=32,
        logprobs=-rng.exponential(1.0, tokens).astype(np.float32),
        loss_mask=np.ones(tokens, dtype=np.bool_),
        versions=(VersionSpan(0, tokens),),
        finish_reason=FinishReason.STOP,
        sampling=SAMPLING,
        reward=0.0,
        score=0.0,
        node_id="node",
        generation_seconds=1.0,
    )


async def main(short: bool, peers: Path | None) -> None:
    few: Callable[[int, int], int] = lambda full, brief: brief if short else full  # noqa: E731
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        at_1024 = await costs(few(16, 4), 8, 1024, folder / "1024")
        at_8192 = await costs(few(16, 4), 4, 8192, folder / "8192")
        atropos = peer(peers, "atropos", 1024)
        transfer = peer(peers, "transfer", 1024)
        growth = await depth_growth(few(100_000, 2_000), few(5, 2), folder / "depth")
        rss, lag = await endurance(few(100_000, 2_000), folder / "endurance")
    finish(
        seed=0,
        ratio_to_redis_1024=round(at_1024["ours"] / at_1024["raw"], 2),
        ratio_to_redis_8192=round(at_8192["ours"] / at_8192["raw"], 2),
        bare_to_redis_1024=round(at_1024["bare"] / at_1024["raw"], 2),
        bare_to_redis_8192=round(at_8192["bare"] / at_8192["raw"], 2),
        ratio_to_atropos=None if atropos is None else round(at_1024["ours"] / atropos, 4),
        ratio_to_transferqueue=None if transfer is None else round(at_1024["ours"] / transfer, 3),
        depth_growth=round(growth, 3),
        rss_growth_mb=round(rss, 1),
        loop_lag_ms_max=round(lag, 1),
        cpu_ms_a_group_1024=round(at_1024["ours"], 3),
    )


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="minutes instead of a quarter hour")
    parser.add_argument("--peers", type=Path, help="holds one virtual environment a peer")
    options = parser.parse_args()
    keep_freed_memory()  # As every Leeway process does; raw Redis' side gains as well.
    asyncio.run(main(options.short, options.peers))
