"""Asks the user's reward function, wherever its workers are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_service.sandbox.work import Workers


class Scorer:
    """Scores completions, as many at once as its caller likes: those beyond the workers wait in
    order."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def score(self, completion: str, columns: Mapping[str, Any]) -> float:
        """What the function says to a completion, given those of the columns that it accepts.

        Raises:
            RewardError: it raised, was late, lacks a column, or returned no finite number.
            DataError: the columns are larger than may travel to a sandbox.
            InfrastructureError: its process died, or a judge failed.
        """
        answer = await self._workers.call({"completion": completion, "columns": dict(columns)})
        return float(answer["value"])
