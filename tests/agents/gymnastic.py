"""A text environment as Gymnasium's users write it."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.spaces import Text


class Gymnastic(gymnasium.Env[str, str]):
    observation_space = Text(100)
    action_space = Text(1000)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "add 3 4", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float("tool_call" in action), False, True, {}
