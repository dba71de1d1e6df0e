"""A simulated fleet and trainer under random faults: nothing lost, nothing trained twice.

    python benchmarks/chaos.py [--faults 300] [--seed N] [--mean-pause 0.7]

Real processes: Redis with its append-only file, two queue services on it, fleets of nodes, a
trainer; every client goes through a proxy that can cut, swallow and delay. Faults come at random:
kill -9 and SIGSTOP of any of them, the network, Redis out of memory or read-only, a clock that
jumps, repeated and late calls. Then the faults stop, the sampler ends, and the run has to finish by
itself.

The last line is JSON: `faults`, `lost` (tasks that did not end, or whose end queue and trainer do
not agree on), `twice` (tasks in more than one step of the final weights), `over_budget`
(trajectories trained with a token over the budget), `corrupt`, `crashes` (processes that ended by
themselves), `conserved`, `finished`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import redis
import yaml

from benchmarks.common import finish
from leeway import config as configuration
from leeway import rpc
from leeway.errors import LeewayError
from leeway.local import free_addresses
from leeway.trajectory import Trajectory
from leeway.v1.queue_pb2 import StatusResponse
from trajectory_queue.client import Leases, OperatorQueue, PushResult, RolloutQueue
from trajectory_queue.embedded import server_binary
from trajectory_queue.main import serve
from trajectory_queue.simulated import Learned, Speed, run_fleet, run_trainer

FLEETS, NODES_A_FLEET, SERVICES = 3, 8, 2
STEP_SECONDS = 0.1
SPEED = Speed(tokens_per_second=60.0, failure_share=0.01)
_FULL, _NOT_FULL = ("CONFIG", "SET", "maxmemory", "1mb"), ("CONFIG", "SET", "maxmemory", "0")
# As in a failover; nobody is at that address.
_REPLICA, _PRIMARY = ("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")
# Longest the run may take to finish once the faults have stopped.
FINISH_SECONDS = 180.0


# The processes -----------------------------------------------------------------------------------


class Repeating(RolloutQueue):
    """A node's client that repeats earlier calls, now and then and much too late."""

    trouble = 0

    def __init__(self, channel: grpc.aio.Channel, node_id: str) -> None:
        super().__init__(channel, node_id)
        self._pushed: list[tuple[str, Sequence[Trajectory]]] = []
        self._leased: list[dict[str, Any]] = []
        self._random = random.Random(node_id)

    async def lease_tasks(self, **request: Any) -> Leases:
        self._leased = [*self._leased[-5:], request]
        if type(self).trouble > 0:
            type(self).trouble -= 1
            await super().lease_tasks(**request)
            for lease_id, trajectories in self._pushed:
                await super().push(lease_id, trajectories)
        return await super().lease_tasks(**request)

    async def push(self, lease_id: str, trajectories: Sequence[Trajectory]) -> PushResult:
        self._pushed = [*self._pushed[-8:], (lease_id, trajectories)]
        result = await super().push(lease_id, trajectories)
        if self._random.random() < 0.05:
            await super().push(*self._random.choice(self._pushed))
        return result


async def service_process(folder: Path, number: int) -> None:
    config = configuration.load(folder / f"service-{number}.yaml")
    skew = folder / f"skew-{number}"
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await serve(
        config, stop=stop, clock=lambda: int(time.time() * 1000) + int(skew.read_text() or 0)
    )


async def fleet_process(folder: Path, number: int) -> None:
    config = configuration.load(folder / f"client-{number % SERVICES}.yaml")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def trouble() -> None:
        Repeating.trouble += 4

    loop.add_signal_handler(signal.SIGUSR1, trouble)
    await run_fleet(config, NODES_A_FLEET, f"fleet-{number}", SPEED, stop, dial=Repeating)


async def trainer_process(folder: Path) -> None:
    config = configuration.load(folder / "client-0.yaml")
    limit = folder / "limit"
    await run_trainer(
        config,
        tasks=lambda: int(limit.read_text()) if limit.exists() else 1 << 30,
        step_seconds=lambda _: STEP_SECONDS,
    )


class Process:
    """One that is started again whenever it ends, unless it says that it is done."""

    def __init__(self, name: str, command: Sequence[str | Path], log: Path) -> None:
        self.name, self._command, self._log = name, command, log
        self.stopped_until = 0.0
        self.crashes = 0
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    @property
    def done(self) -> bool:
        return self.process.poll() == 0

    def tend(self) -> None:
        if self.stopped_until and time.monotonic() >= self.stopped_until:
            self.stopped_until = 0.0
            self.signal(signal.SIGCONT)
        if self.process.poll() not in (None, 0):
            self.crashes += self.process.returncode > 0  # No signal ended it.
            self.start()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Proxy:
    """Between clients and one service."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self.delay = 0.0
        self.swallow = False

    async def start(self) -> int:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, far_writer}
        pumps = [self._pump(reader, far_writer), self._pump(far_reader, writer)]
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*pumps, return_exceptions=True)
        self._open -= {writer, far_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                if self.delay:
                    await asyncio.sleep(self.delay)
                if not self.swallow:
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.transport.abort()


# Faults ------------------------------------------------------------------------------------------


class Chaos:
    """The run, and what is done to it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self._later: list[tuple[float, Callable[[], None]]] = []
        self.injected: Counter[str] = Counter()

    async def start(self) -> None:
        folder = self._folder
        (folder / "redis").mkdir()
        socket_path = folder / "redis" / "s"
        (folder / "redis.conf").write_text(
            f"port 0\nunixsocket {socket_path}\ndir {folder}/redis\nappendonly yes\n"
            'appendfsync everysec\nsave ""\nmaxmemory-policy noeviction\n'
        )
        self._redis_url = f"unix://{socket_path}"
        self._redis = self._process("redis", server_binary(), folder / "redis.conf")
        ports = [int(address.rpartition(":")[2]) for address in free_addresses(SERVICES)]
        self._proxies = [Proxy(port) for port in ports]
        for number, port in enumerate(ports):
            _write_config(folder / f"service-{number}.yaml", folder, port, self._redis_url)
            _write_config(
                folder / f"client-{number}.yaml", folder, await self._proxies[number].start()
            )
            (folder / f"skew-{number}").write_text("0")
        this = [sys.executable, "-m", "benchmarks.chaos", "--folder", str(folder)]
        self._services = [
            self._process(f"service-{n}", *this, "--service", str(n)) for n in range(SERVICES)
        ]
        self._fleets = [
            self._process(f"fleet-{n}", *this, "--fleet", str(n)) for n in range(FLEETS)
        ]
        self._trainer = self._process("trainer", *this, "--trainer")
        self._all = [self._redis, *self._services, *self._fleets, self._trainer]

    def _process(self, name: str, *command: str | Path) -> Process:
        return Process(name, command, self._folder / f"{name}.log")

    async def torment(self, faults: int, mean_pause: float) -> None:
        kinds: list[tuple[str, Callable[[], None]]] = [
            ("kill fleet", lambda: self._any(self._fleets).signal(signal.SIGKILL)),
            ("drain fleet", lambda: self._any(self._fleets).signal(signal.SIGTERM)),
            ("drain service", lambda: self._any(self._services).signal(signal.SIGTERM)),
            ("kill service", lambda: self._any(self._services).signal(signal.SIGKILL)),
            ("kill redis", lambda: self._redis.signal(signal.SIGKILL)),
            ("kill trainer", lambda: self._trainer.signal(signal.SIGKILL)),
            ("freeze", self._freeze),
            ("cut", lambda: self._any(self._proxies).cut()),
            ("swallow", lambda: self._for_a_while("swallow", True, False)),
            ("delay", lambda: self._for_a_while("delay", 0.2, 0.0)),
            ("redis full", lambda: self._ail(_FULL, _NOT_FULL)),
            ("redis read-only", lambda: self._ail(_REPLICA, _PRIMARY)),
            ("clock", self._jump),
            ("repeat", lambda: self._any(self._fleets).signal(signal.SIGUSR1)),
        ]
        for number in range(faults):
            kind, inject = self._random.choice(kinds)
            self.injected[kind] += 1
            inject()
            if number % 25 == 24:
                print(f"{number + 1} faults: {dict(self.injected)}", flush=True)
            await self._tend_for(self._random.expovariate(1 / mean_pause))
        while self._later:
            await self._tend_for(0.1)

    async def finish(self) -> bool:
        """Ends the sampler; whether the run then finished by itself."""
        enqueued = (await self._status()).enqueued
        (self._folder / "limit").write_text(str(enqueued + 50))
        end = time.monotonic() + FINISH_SECONDS
        while not (self._trainer.done and all(fleet.done for fleet in self._fleets)):
            if time.monotonic() > end:
                return False
            await self._tend_for(0.1)
        return True

    async def verdict(self) -> dict[str, Any]:
        status = await self._status()
        learned = Learned.load(self._folder / "run" / "learned.json")
        groups = dict(status.groups)
        trained = Counter(task for _, tasks in learned.steps for task in tasks)
        unfinished = sum(groups[s] for s in ("waiting", "running", "queued", "leased"))
        print(f"groups: {groups}\ncounters: {dict(status.counters)}")
        return {
            "lost": unfinished
            + abs(groups["committed"] - len(trained))
            + abs(status.enqueued - learned.position),
            "twice": sum(trained.values()) - len(trained),
            "over_budget": learned.over_budget,
            "corrupt": learned.corrupt,
            "crashes": sum(process.crashes for process in self._all),
            "conserved": sum(groups.values()) == status.enqueued and status.payload_bytes == 0,
            "tasks": status.enqueued,
            "steps": len(learned.steps),
            "lives": status.incarnation,
        }

    async def _status(self) -> StatusResponse:
        config = configuration.load(self._folder / "client-0.yaml")
        async with rpc.connect(config.queue.address, config.security) as channel:
            asking = asyncio.create_task(OperatorQueue(channel).status())
            while not asking.done():
                await self._tend_for(0.1)
            return asking.result()

    def end(self) -> None:
        for process in self._all:
            process.end()

    async def _tend_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            for process in self._all:
                # What was drained on purpose is started again too.
                if process.done and not self._trainer.done:
                    process.start()
                process.tend()
            due = [action for at, action in self._later if at <= time.monotonic()]
            self._later = [pair for pair in self._later if pair[0] > time.monotonic()]
            for action in due:
                action()
            left = end - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(min(left, 0.05))

    def _any(self, choices: Sequence[Any]) -> Any:
        return self._random.choice(choices)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, action))

    def _freeze(self) -> None:
        process = self._any(self._all)
        process.signal(signal.SIGSTOP)
        process.stopped_until = time.monotonic() + self._random.uniform(0.5, 4.0)

    def _for_a_while(self, attribute: str, bad: Any, good: Any) -> None:
        proxy = self._any(self._proxies)
        setattr(proxy, attribute, bad)

        def mend() -> None:
            setattr(proxy, attribute, good)
            proxy.cut()  # What was swallowed cannot be mended in the middle of a stream.

        self._after(self._random.uniform(0.5, 4.0), mend)

    def _ail(self, command: tuple[str, ...], cure: tuple[str, ...]) -> None:
        """Redis serves nobody's writes for a while."""
        self._tell_redis(command)
        self._after(self._random.uniform(0.5, 3.0), lambda: self._cure(cure))

    def _cure(self, cure: tuple[str, ...]) -> None:
        """Where Redis is away, again in a while: nobody else does."""
        if not self._tell_redis(cure):
            self._after(0.5, lambda: self._cure(cure))

    def _tell_redis(self, command: tuple[str, ...]) -> bool:
        try:
            with redis.Redis.from_url(self._redis_url, socket_timeout=0.5) as client:
                client.execute_command(*command)
        except redis.RedisError:
            return False
        return True

    def _jump(self) -> None:
        path = self._folder / f"skew-{self._random.randrange(SERVICES)}"
        draft = path.with_suffix(".draft")
        draft.write_text(str(self._random.randint(-20_000, 20_000)))
        draft.replace(path)


def _write_config(path: Path, folder: Path, port: int, redis_url: str | None = None) -> None:
    path.write_text(
        yaml.safe_dump(
            {
                "run": {"name": "run", "directory": str(folder)},
                "model": {"path": "unused"},
                "task": {"jsonl": "unused", "reward": "unused:unused"},
                "sampling": {"group_size": 4, "max_new_tokens": 64},
                "staleness": {"budget": 2},
                "rollout": {"concurrency": 8, "heartbeat_seconds": 0.5},
                "trainer": {"batch_groups": 8, "batch_seconds": 2, "checkpoint_every": 5},
                "queue": {
                    "address": f"127.0.0.1:{port}",
                    "redis_url": redis_url,
                    "lease_seconds": 4,
                    "max_attempts": 20,
                    "filter_equal_scores": True,
                },
            }
        )
    )


async def main(faults: int, seed: int, mean_pause: float) -> int:
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        print(f"seed {seed}, logs in {name}", flush=True)
        chaos = Chaos(Path(name), seed)
        await chaos.start()
        try:
            await chaos.torment(faults, mean_pause)
            finished = await chaos.finish()
            verdict = await chaos.verdict()
        finally:
            chaos.end()
            if os.environ.get("CHAOS_LOGS"):
                shutil.copytree(name, os.environ["CHAOS_LOGS"], ignore=shutil.ignore_patterns("s"))
    finish(seed, faults=sum(chaos.injected.values()), finished=finished, **verdict)
    bad = sum(verdict[name] for name in ("lost", "twice", "over_budget", "corrupt", "crashes"))
    return 0 if finished and verdict["conserved"] and not bad else 1


def child(options: argparse.Namespace) -> Awaitable[None] | None:
    if options.service is not None:
        return service_process(options.folder, options.service)
    if options.fleet is not None:
        return fleet_process(options.folder, options.fleet)
    return trainer_process(options.folder) if options.trainer else None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--mean-pause", type=float, default=0.7, help="seconds between faults")
    for name in ("service", "fleet"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--trainer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = child(options)
    if work is not None:
        try:
            asyncio.run(work)  # type: ignore[arg-type]
        except LeewayError as error:
            sys.exit(f"{type(error).__name__}: {error}")
        sys.exit(0)
    seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    sys.exit(asyncio.run(main(options.faults, seed, options.mean_pause)))
