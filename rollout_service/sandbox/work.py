"""What workers run, and the seam between a node and its workers.

`pool` has them as children of its own process; `remote` reaches those of `leeway sandbox` pods,
which are the same pool behind a service.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from leeway.config import TaskConfig
from leeway.errors import ConfigError

DEFAULT_REWARD = "rollout_service.rewards.builtin:reasoning_gym"
"""What scores when `task.reward` is not given."""
MOST_QUESTIONS = 100
"""Times that one call may turn to its judges."""
START_SECONDS = 60.0
"""For imports of heavy libraries on a busy machine."""

Caller = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""Calls a worker that is kept."""


@dataclass(frozen=True, slots=True)
class Work:
    """A user's function or environment, and the limits of the processes that hold it.

    Attributes:
        kind: "reward" or "environment".
        spec: What the user wrote, `module:name` or `path/to/file.py:name`.
        processes: So many calls or episodes at once.
        seconds: The deadline of a call, without what its judges take.
        memory_bytes: What a process may have of its own.
        kept_seconds: The longest that one caller keeps a process.
    """

    kind: str
    spec: str
    processes: int
    seconds: float
    memory_bytes: int = 4 << 30
    kept_seconds: float = 600.0

    @property
    def key(self) -> str:
        """Of the configuration, for messages."""
        return f"task.{self.kind}"

    @classmethod
    def of(cls, task: TaskConfig) -> Work:
        """Raises `ConfigError` for a task whose answers an agent rates itself."""
        if task.environment is not None:
            return cls(
                "environment",
                task.environment,
                task.environment_processes,
                task.environment_seconds,
                task.memory_bytes,
                task.session_seconds,
            )
        if task.agent is not None:
            raise ConfigError(
                f"task.agent = {task.agent!r}: only task.reward and task.environment have workers"
            )
        return cls(
            "reward",
            task.reward or DEFAULT_REWARD,
            task.reward_processes,
            task.reward_seconds,
            task.memory_bytes,
            task.reward_seconds + MOST_QUESTIONS * task.judge_seconds,
        )


class Workers(Protocol):
    """Processes that hold one `Work`."""

    async def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What the code says to one request that stands alone.

        Raises:
            RewardError: it raised, was late, or returned what it may not.
            DataError: the request is larger than may be.
            InfrastructureError: its process died, or none was free; a judge that it asked failed;
                or it raised this itself.
        """
        ...

    def take(self, patience: float | None = None) -> AbstractAsyncContextManager[Caller]:
        """Keeps a worker for the context; yields what calls it (see `call`).

        Args:
            patience: How long to wait for a free worker; by default as long as calls may take.
        """
        ...


AskJudge = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""Puts a question to a judge. Raises `InfrastructureError` when the judge failed."""


class Judges(Protocol):
    """What a worker's code may ask; see `rewards.judges`."""

    @property
    def names(self) -> list[str]: ...

    @property
    def seconds(self) -> float:
        """The longest that one question may take."""
        ...

    async def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """As `AskJudge`."""
        ...
