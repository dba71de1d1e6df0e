"""The process that agents' `async def run(task, session)` share, and its two ends.

Agents mostly wait (for the model, for tools), so that one process serves many of them in one event
loop. What must hold: a run that is cancelled is cancelled there as well; one that blocks the loop
past its grace is ended with the process, and the others with it, as infrastructure: they are tried
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from leeway.errors import ConfigError, DeadlineError, InfrastructureError, RewardError
from leeway.orphans import end_with_parent
from rollout_service.sandbox.loading import (
    FaultError,
    answer_line,
    describe,
    fault_line,
    load,
    outcome,
)
from rollout_service.sandbox.surroundings import surroundings
from rollout_service.sandbox.worker import limit_memory, pipes

_START_SECONDS = 60.0
# How long a cancelled run may take to leave.
_GRACE_SECONDS = 5.0
_LINE_BYTES = 4 << 20


class AgentProcess:
    """The node's end: an asynchronous context manager that keeps the process running."""

    def __init__(self, spec: str, memory_bytes: int) -> None:
        self._spec = spec
        self._memory_bytes = memory_bytes
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Raises `ConfigError` when the agent cannot be loaded."""
        await self._running()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._kill()

    async def run(self, request: Mapping[str, Any]) -> dict[str, float] | None:
        """One run of the agent: its outcome by name, None where it rated its session itself.

        Raises:
            RewardError: it raised, or returned what it may not.
            InfrastructureError: its process died or hung.
        """
        process = await self._running()
        number = next(self._ids)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(process, {"run": number, **request})
            message = await asyncio.shield(answer)
        except asyncio.CancelledError:
            await self._cancel(process, number)
            raise
        finally:
            self._waiting.pop(number, None)
        if "fault" in message:
            raise RewardError(f"{self._spec} {message['fault']}")
        result: dict[str, float] | None = message["outcome"]
        return result

    async def _cancel(self, process: asyncio.subprocess.Process, number: int) -> None:
        """Tells the run to leave; a loop that does not answer is blocked, and is ended."""
        left = self._waiting[number]
        if left.done() or process is not self._process:
            return
        await self._send(process, {"cancel": number})
        await asyncio.wait({left}, timeout=_GRACE_SECONDS)
        if not left.done() and process is self._process:
            await self._kill()

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None:
                self._process = await self._start()
                self._reader = asyncio.create_task(self._read(self._process))
            return self._process

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            str(Path(__file__)),
            self._spec,
            str(os.getpid()),
            str(self._memory_bytes),
            env=surroundings(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        assert process.stdout is not None  # it is a pipe
        started = False
        try:
            async with asyncio.timeout(_START_SECONDS):
                line = await process.stdout.readline()
            first = json.loads(line) if line else {"fault": "its process died while loading"}
            if "fault" in first:
                raise ConfigError(f"task.agent = {self._spec!r}: {first['fault']}")
            started = True
        except TimeoutError as error:
            raise DeadlineError(
                f"task.agent = {self._spec!r}: not loaded after {_START_SECONDS:g} s; do less when "
                "its module is imported"
            ) from error
        finally:
            if not started:
                await _end(process)
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            message = json.loads(line)
            answer = self._waiting.get(message["run"])
            if answer is not None and not answer.done():
                answer.set_result(message)
        if process is self._process:
            await self._kill()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        await _end(process)
        waiting = list(self._waiting.values())
        for answer in waiting:
            if not answer.done():
                answer.set_exception(
                    InfrastructureError(f"{self._spec}: its process died or was blocked")
                )
                answer.exception()  # Seen, also where nobody waits any more.

    async def _send(self, process: asyncio.subprocess.Process, message: dict[str, Any]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_read` will notice.
            process.stdin.write(json.dumps(message).encode() + b"\n")
            await process.stdin.drain()


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


# In the agents' process --------------------------------------------------------------------------


@dataclass(frozen=True)
class AgentTask:
    """What a run is about.

    Attributes:
        messages: The task's chat messages.
        columns: The data row's other columns.
        index: Which sample of the task this is.
    """

    task_id: str
    index: int
    messages: list[dict[str, Any]]
    columns: dict[str, Any]


@dataclass(frozen=True)
class AgentSession:
    """Where a run finds its policy: any OpenAI or Anthropic client works with these two."""

    session_id: str
    api_key: str = field(repr=False)
    base_url: str

    @cached_property
    def client(self) -> Any:
        """An `openai.AsyncOpenAI`."""
        import openai

        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key)


async def _serve(spec: str, requests: Any, answers: Any) -> None:
    def answer(message: dict[str, Any]) -> None:
        line = fault_line(message["fault"], message) if "fault" in message else answer_line(message)
        answers.write(line)
        answers.flush()

    try:
        function = load(spec)
        if not inspect.iscoroutinefunction(function):
            raise FaultError("is no `async def run(task, session)`")
    except FaultError as fault:
        answer({"fault": str(fault)})
        return
    answer({"ready": True})
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), requests)
    runs: dict[int, asyncio.Task[None]] = {}

    async def run(number: int, task: dict[str, Any], session: dict[str, Any]) -> None:
        try:
            value = await function(AgentTask(**task), AgentSession(**session))
            result = None if value is None else outcome(value)
            answer({"run": number, "outcome": result})
        except FaultError as fault:
            answer({"run": number, "fault": str(fault)})
        except asyncio.CancelledError:
            answer({"run": number, "fault": "was cancelled"})
        except (Exception, SystemExit) as error:
            answer({"run": number, "fault": f"raised {describe(error)}; handle this in the agent"})
        finally:
            runs.pop(number)

    while line := await lines.readline():
        message = json.loads(line)
        if "cancel" in message:
            if message["cancel"] in runs:
                runs[message["cancel"]].cancel()
            continue
        number = message["run"]
        runs[number] = asyncio.create_task(run(number, message["task"], message["session"]))


def main(spec: str, parent: int, memory_bytes: int) -> None:
    end_with_parent(parent)
    limit_memory(memory_bytes)
    requests, answers = pipes()
    asyncio.run(_serve(spec, requests, answers))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
