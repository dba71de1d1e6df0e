"""Programs that talk to the gateway by HTTP: a function, a command, one that runs elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections import deque
from collections.abc import Sequence
from typing import Any

from leeway.errors import RewardError
from leeway.trajectory import Task
from rollout_service.gateway.sessions import Session
from rollout_service.sandbox.agents import AgentProcess
from rollout_service.sandbox.surroundings import surroundings
from rollout_service.workflows.base import Sample

# Of what a failed command wrote, its end says why.
_TOLD_CHARACTERS = 600


class FunctionProgram:
    """`async def run(task, session) -> float | dict`, in a process that many runs share.

    Args:
        base_url: Of the gateway, with /v1.
    """

    def __init__(self, process: AgentProcess, base_url: str) -> None:
        self._process = process
        self._base_url = base_url

    async def run(self, sample: Sample, session: Session) -> None:
        outcome = await self._process.run(
            {
                "task": describe(sample.task, sample.index),
                "session": {
                    "session_id": session.session_id,
                    "api_key": session.key,
                    "base_url": self._base_url,
                },
            }
        )
        if outcome is not None:
            session.finish(outcome)


class CommandProgram:
    """A command with a process of its own for every session.

    It gets OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, LEEWAY_TASK
    (JSON), and LEEWAY_SESSION_URL, where it rates its session.
    """

    def __init__(self, command: Sequence[str], base_url: str) -> None:
        self._command = list(command)
        self._base_url = base_url

    async def run(self, sample: Sample, session: Session) -> None:
        root = self._base_url.removesuffix("/v1")
        environment = {
            **surroundings(),
            "OPENAI_BASE_URL": self._base_url,
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": session.key,
            "LEEWAY_SESSION_URL": f"{root}/sessions/{session.session_id}",
            "LEEWAY_TASK": json.dumps(describe(sample.task, sample.index)),
        }
        with tempfile.TemporaryFile() as output:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
            try:
                status = await process.wait()
            finally:
                # With all that it started, whether it has ended or is ended.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            if status != 0:
                output.seek(0)
                said = output.read().decode(errors="replace").strip()[-_TOLD_CHARACTERS:]
                raise RewardError(
                    f"task.agent = {self._command}: ended with status {status}; it said: {said}"
                )


class ExternalProgram:
    """Offers sessions at /sessions to programs that run elsewhere."""

    def __init__(self) -> None:
        self._offered: deque[tuple[Session, Task, int]] = deque()

    def take(self) -> tuple[Session, Task, int] | None:
        while self._offered:
            session, task, index = self._offered.popleft()
            if not session.closed.is_set():
                return session, task, index
        return None

    async def run(self, sample: Sample, session: Session) -> None:
        self._offered.append((session, sample.task, sample.index))
        await session.closed.wait()


def describe(task: Task, index: int) -> dict[str, Any]:
    """A task as programs get it."""
    return {
        "task_id": task.task_id,
        "index": index,
        "messages": [dict(message) for message in task.messages],
        "columns": dict(task.columns),
    }
