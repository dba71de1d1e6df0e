"""Calls the user's reward function in worker processes that can be killed.

Who calls: the single-turn workflow, `await pool.score(completion, columns)`, as often at once as it
likes; `processes` calls run, the others wait in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leeway.config import TaskConfig
from rollout_service.sandbox.pool import Judges, WorkerPool

DEFAULT_REWARD = "rollout_service.rewards.builtin:reasoning_gym"
"""What scores when `task.reward` is not given."""

_MEMORY_BYTES = 4 << 30


class RewardPool(WorkerPool):
    """Scores completions; see `WorkerPool`."""

    def __init__(
        self,
        reward: str,
        *,
        processes: int,
        seconds: float,
        memory_bytes: int = _MEMORY_BYTES,
        judges: Judges | None = None,
    ) -> None:
        super().__init__(
            "reward",
            "task.reward",
            reward,
            processes=processes,
            seconds=seconds,
            memory_bytes=memory_bytes,
            judges=judges,
        )

    @classmethod
    def of(cls, config: TaskConfig, judges: Judges | None = None) -> RewardPool:
        return cls(
            config.reward or DEFAULT_REWARD,
            processes=config.reward_processes,
            seconds=config.reward_seconds,
            memory_bytes=config.memory_bytes,
            judges=judges,
        )

    async def score(self, completion: str, columns: Mapping[str, Any]) -> float:
        """What the function says to a completion, given those of the columns that it accepts.

        Raises:
            RewardError: it raised, was late, lacks a column, or returned no finite number.
            InfrastructureError: its process died, or a judge failed.
        """
        answer = await self.call({"completion": completion, "columns": dict(columns)})
        return float(answer["value"])
