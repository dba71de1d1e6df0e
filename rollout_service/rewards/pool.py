"""Calls the user's reward function in worker processes that can be killed.

Who calls: the rollout node, `await pool.score(completion, columns)`, as often at once as it likes;
`processes` calls run, the others wait in order.

What must hold: a call ends within the deadline, with a finite number or a typed error. Whatever the
function does (raises, hangs, prints, kills its process) touches this call alone: a worker that was
killed or died is replaced. No worker outlives the pool or its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from prometheus_client import Counter

from leeway.config import TaskConfig
from leeway.errors import ConfigError, DeadlineError, InfrastructureError, RewardError

CALLS = Counter(
    "leeway_reward_calls_total", "Calls of the reward function, by how they ended", ["outcome"]
)

DEFAULT_REWARD = "rollout_service.rewards.builtin:reasoning_gym"
"""What scores when `task.reward` is not given."""

# Imports of heavy libraries on a busy machine.
_START_SECONDS = 60.0
# From the end of a worker's pipe to the end of its process.
_DEATH_SECONDS = 1.0


class RewardPool:
    """An asynchronous context manager; see the module's docstring.

    Entering loads the function once, so that what is wrong with it is known before any task is
    leased; further workers start when they are needed.
    """

    def __init__(self, reward: str, *, processes: int, seconds: float) -> None:
        self._reward = reward
        self._processes = processes
        self._seconds = seconds
        self._queued = 0
        self._closed = False
        self._workers: set[_Worker] = set()
        # One entry a slot. Last in, first out: a running worker before one to be started.
        self._idle: asyncio.LifoQueue[_Worker | None] = asyncio.LifoQueue()

    @classmethod
    def of(cls, config: TaskConfig) -> RewardPool:
        return cls(
            config.reward or DEFAULT_REWARD,
            processes=config.reward_processes,
            seconds=config.reward_seconds,
        )

    async def __aenter__(self) -> RewardPool:
        """Raises:
        ConfigError: the function cannot be imported, or cannot be called with a completion.
        InfrastructureError: its process died or hung while it was loading.
        """
        for _ in range(self._processes - 1):
            self._idle.put_nowait(None)
        self._idle.put_nowait(await self._start())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Kills all workers; calls that are under way end with an `InfrastructureError`."""
        self._closed = True
        await asyncio.gather(*(self._end(worker) for worker in list(self._workers)))

    async def score(self, completion: str, columns: Mapping[str, Any]) -> float:
        """What the function says to a completion, given those of the columns that it accepts.

        Raises:
            RewardError: it raised, was late, lacks a column, or returned no finite number.
            InfrastructureError: its process died.
        """
        request = json.dumps({"completion": completion, "columns": dict(columns)})
        worker = await self._next_idle()
        answered = False
        try:
            if self._closed:
                raise InfrastructureError(f"{self._reward}: the reward pool is closed")
            worker = worker or await self._start()
            answer = await self._ask(worker, request)
            answered = True
        finally:
            # One that has not answered (late, dead, or the caller is gone) never serves again.
            self._idle.put_nowait(worker if answered else None)
            if worker is not None and not answered:
                await self._end(worker)
        if "fault" in answer:
            CALLS.labels("fault").inc()
            raise RewardError(f"{self._reward} {answer['fault']}")
        CALLS.labels("ok").inc()
        return float(answer["value"])

    async def _next_idle(self) -> _Worker | None:
        # Every call ahead ends by its deadline, at worst with the start of a new worker.
        rounds = self._queued // self._processes + 1
        seconds = rounds * (self._seconds + _START_SECONDS)
        self._queued += 1
        try:
            async with asyncio.timeout(seconds):
                return await self._idle.get()
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._reward}: no reward process was free for {seconds:g} s; raise "
                f"task.reward_processes (now {self._processes})"
            ) from error
        finally:
            self._queued -= 1

    async def _start(self) -> _Worker:
        worker = await _Worker.start(self._reward)
        self._workers.add(worker)
        loaded = False
        try:
            async with asyncio.timeout(_START_SECONDS):
                answer = await worker.receive()
            if answer is None:
                raise InfrastructureError(
                    f"task.reward = {self._reward!r}: its process died while loading "
                    f"({await worker.ended()})"
                )
            if "fault" in answer:
                raise ConfigError(f"task.reward = {self._reward!r}: {answer['fault']}")
            loaded = True
        except TimeoutError as error:
            raise DeadlineError(
                f"task.reward = {self._reward!r}: not loaded after {_START_SECONDS:g} s; do less "
                "when its module is imported"
            ) from error
        finally:
            if not loaded:
                await self._end(worker)
        return worker

    async def _ask(self, worker: _Worker, request: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._seconds):
                await worker.send(request)
                answer = await worker.receive()
        except TimeoutError as error:
            CALLS.labels("deadline").inc()
            raise RewardError(
                f"{self._reward} was not done after {self._seconds:g} s and was killed; make it "
                "faster, or raise task.reward_seconds"
            ) from error
        if answer is None:
            CALLS.labels("died").inc()
            raise InfrastructureError(
                f"{self._reward}: its process died during a call "
                f"({await worker.ended()}) and is replaced; see that the "
                "function neither exits, crashes nor runs out of memory"
            )
        return answer

    async def _end(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        await worker.kill()


class _Worker:
    """One worker process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None  # both are pipes
        self._process = process
        self._requests = process.stdin
        self._answers = process.stdout

    @classmethod
    async def start(cls, reward: str) -> _Worker:
        # As a script, apart from this package (-P): so it starts in a few hundredths of a second.
        # In a session of its own: so what the function starts can be killed with it.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            str(Path(__file__).with_name("worker.py")),
            reward,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return cls(process)

    async def send(self, request: str) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `receive` will say so.
            self._requests.write(request.encode() + b"\n")
            await self._requests.drain()

    async def receive(self) -> dict[str, Any] | None:
        """None when the process has ended."""
        line = await self._answers.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    async def ended(self) -> str:
        """How a process whose pipe has ended came to its end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DEATH_SECONDS):
                await self._process.wait()
        status = self._process.returncode
        if status is None:
            return "it closed its pipe"
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"

    async def kill(self) -> None:
        """Ends the process, if it still runs, with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._requests.close()
        await self._process.wait()
