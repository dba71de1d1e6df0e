"""The models that a step changes, saved and resumed as one: the policy, and a critic beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer_service.backends.base import Backend

CRITIC = "critic"
"""Its part of a checkpoint: a directory of the same files as the policy's."""


@dataclass(frozen=True, slots=True)
class Learners:
    """Each is a backend; a critic scores tokens with values."""

    policy: Backend
    critic: Backend | None = None

    def snapshot(self) -> Callable[[Path], None]:
        """Of both, as `Backend.snapshot`."""
        policy = self.policy.snapshot()
        critic = None if self.critic is None else self.critic.snapshot()

        def write(directory: Path) -> None:
            policy(directory)
            if critic is not None:
                (directory / CRITIC).mkdir()
                critic(directory / CRITIC)

        return write

    def save(self, directory: Path) -> None:
        """`snapshot`, written at once."""
        self.snapshot()(directory)

    def load(self, directory: Path) -> None:
        """Restores both.

        Raises:
            ConfigError: The files are of another model, or there are none of a critic.
        """
        self.policy.load(directory)
        if self.critic is not None:
            self.critic.load(directory / CRITIC)
