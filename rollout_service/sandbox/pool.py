"""Worker processes that can be killed, and the calls made to them.

A pool of equal workers. `call` takes any that is idle; `take` keeps one for an episode. Who waits
is served in order.

What must hold: a call ends within the deadline, with an answer or a typed error. Whatever the
user's code does (raises, hangs, prints, kills its process) touches this call, or episode, alone: a
worker that was killed or died is replaced. No worker outlives the pool or its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from prometheus_client import Counter

from leeway.errors import ConfigError, DeadlineError, InfrastructureError, RewardError
from rollout_service.sandbox.loading import ANSWER_BYTES
from rollout_service.sandbox.surroundings import surroundings
from rollout_service.sandbox.work import (
    MOST_QUESTIONS,
    START_SECONDS,
    AskJudge,
    Caller,
    Judges,
    Work,
)

CALLS = Counter(
    "leeway_reward_calls_total",
    "Calls of reward functions and environments, by how they ended",
    ["outcome"],
)

# From the end of a worker's pipe to the end of its process.
_DEATH_SECONDS = 1.0


class WorkerPool:
    """The `Workers` of this process, an asynchronous context manager; see the module's docstring.

    Entering loads the code once, so that what is wrong with it is known before any task is leased;
    further workers start when they are needed.
    """

    def __init__(self, work: Work, judges: Judges | None = None) -> None:
        self._work = work
        self._judges = judges
        self._queued = 0
        self._closed = False
        self._workers: set[_Worker] = set()
        # One entry a slot. Last in, first out: a running worker before one to be started.
        self._idle: asyncio.LifoQueue[_Worker | None] = asyncio.LifoQueue()

    async def __aenter__(self) -> Self:
        """Raises:
        ConfigError: the function cannot be imported, or cannot be called with a completion.
        InfrastructureError: its process died or hung while it was loading.
        """
        for _ in range(self._work.processes - 1):
            self._idle.put_nowait(None)
        self._idle.put_nowait(await self._start())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Kills all workers; calls that are under way end with an `InfrastructureError`."""
        self._closed = True
        await asyncio.gather(*(self._end(worker) for worker in list(self._workers)))

    async def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """See `Workers`."""
        async with self.take() as ask:
            return await ask(request)

    @asynccontextmanager
    async def take(
        self, patience: float | None = None, ask_judge: AskJudge | None = None
    ) -> AsyncIterator[Caller]:
        """See `Workers`.

        Args:
            ask_judge: Who asks the judges for this caller; by default the pool's own.
        """
        worker = await self._next_idle(patience)
        healthy = False
        try:
            if self._closed:
                raise InfrastructureError(f"{self._work.spec}: the pool is closed")
            kept = worker = worker or await self._start()
            answered = True

            async def ask(request: Mapping[str, Any]) -> dict[str, Any]:
                nonlocal answered
                answered = False
                answer = await self._ask(kept, json.dumps(dict(request)), ask_judge)
                answered = True
                if "infrastructure" in answer:
                    CALLS.labels("away").inc()
                    raise InfrastructureError(f"{self._work.spec} {answer['fault']}")
                if "fault" in answer:
                    CALLS.labels("fault").inc()
                    raise RewardError(f"{self._work.spec} {answer['fault']}")
                CALLS.labels("ok").inc()
                return answer

            try:
                yield ask
            finally:
                healthy = answered
        finally:
            # One that has not answered (late, dead, or the caller is gone) never serves again.
            self._idle.put_nowait(worker if healthy else None)
            if worker is not None and not healthy:
                await self._end(worker)

    async def _next_idle(self, patience: float | None) -> _Worker | None:
        # Every call ahead ends by its deadline, at worst with the start of a new worker.
        rounds = self._queued // self._work.processes + 1
        asking = self._judges.seconds if self._judges is not None else 0.0
        seconds = patience or rounds * (self._work.seconds + asking + START_SECONDS)
        self._queued += 1
        try:
            async with asyncio.timeout(seconds):
                return await self._idle.get()
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._work.spec}: no process was free for {seconds:g} s; raise "
                f"{self._work.key}_processes (now {self._work.processes})"
            ) from error
        finally:
            self._queued -= 1

    async def _start(self) -> _Worker:
        judges = self._judges.names if self._judges is not None else []
        worker = await _Worker.start(
            self._work.kind, self._work.spec, self._work.memory_bytes, judges
        )
        self._workers.add(worker)
        loaded = False
        try:
            async with asyncio.timeout(START_SECONDS):
                answer = await worker.receive()
            if answer is None:
                raise InfrastructureError(
                    f"{self._work.key} = {self._work.spec!r}: its process died while loading "
                    f"({await worker.ended()})"
                )
            if "fault" in answer:
                raise ConfigError(f"{self._work.key} = {self._work.spec!r}: {answer['fault']}")
            loaded = True
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._work.key} = {self._work.spec!r}: not loaded after {START_SECONDS:g} s; do "
                "less when its module is imported"
            ) from error
        finally:
            if not loaded:
                await self._end(worker)
        return worker

    async def _ask(
        self, worker: _Worker, request: str, ask_judge: AskJudge | None
    ) -> dict[str, Any]:
        """One call: its judges' answers go back to it until it answers itself."""
        left, message, asked = self._work.seconds, request, 0
        failure: InfrastructureError | None = None
        clock = asyncio.get_running_loop().time
        while True:
            started = clock()
            answer = await self._exchange(worker, message, left)
            left -= clock() - started
            if "judge" not in answer:
                break
            asked += 1
            assert self._judges is not None  # a worker without judges asks none
            ask_judge = ask_judge or self._judges.answer
            try:
                if asked > MOST_QUESTIONS:
                    raise RewardError(
                        f"{self._work.spec} turned to its judges {MOST_QUESTIONS} times in one "
                        "call; ask several questions at once (judge.ask_all)"
                    )
                reply = await ask_judge(answer)
            except InfrastructureError as error:
                failure, reply = failure or error, {"failed": str(error)}
            message = json.dumps(reply)
        if failure is not None:
            CALLS.labels("judge").inc()
            raise failure
        return answer

    async def _exchange(self, worker: _Worker, message: str, seconds: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                await worker.send(message)
                answer = await worker.receive()
        except TimeoutError as error:
            CALLS.labels("deadline").inc()
            raise RewardError(
                f"{self._work.spec} was not done after {self._work.seconds:g} s and was killed; "
                f"make it faster, or raise {self._work.key}_seconds"
            ) from error
        if answer is None:
            CALLS.labels("died").inc()
            raise InfrastructureError(
                f"{self._work.spec}: its process died during a call "
                f"({await worker.ended()}) and is replaced; see that the "
                "code neither exits, crashes nor runs out of memory"
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
    async def start(cls, kind: str, spec: str, memory_bytes: int, judges: list[str]) -> _Worker:
        # As a script, apart from this package (-P): so it starts in a few hundredths of a second.
        # In a session of its own: so what the code starts can be killed with it.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            str(Path(__file__).with_name("worker.py")),
            kind,
            spec,
            str(os.getpid()),
            str(memory_bytes),
            json.dumps(judges),
            env=surroundings(),
            limit=ANSWER_BYTES,
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
