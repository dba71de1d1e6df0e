"""How stale data may be, and the queue that keeps it so."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
)

from leeway.config.services import LOOPBACK_ANY_PORT
from leeway.section import Limits, Section


class OverBudget(StrEnum):
    """What happens at dequeue to data that is over the staleness budget."""

    MASK = "mask"
    DROP = "drop"
    KEEP = "keep"


class AutoBudgetConfig(Limits):
    """Limits and bounds of the controller that `staleness.budget: auto` turns on."""

    lowest: PositiveInt = 1
    highest: PositiveInt = 8
    waiting_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.01
    """The budget is widened when the trainer waits for more than this share of its time while
    admission is at the budget: then each side waits for the other."""
    lowest_sample_size: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """The health band: `effective_sample_size` at least this,"""
    highest_chi2: PositiveFloat = 1.0
    """`chi2_token`, the second moment of the off-policy ratio less 1, at most this,"""
    highest_clip_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3
    """and `clip_fraction` at most this. Outside the band the budget is halved."""
    margin: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.2
    """It is widened only if health is inside the band by this part of each bound."""
    forget_steps: PositiveInt = 50
    """A budget that was unhealthy is not tried again for so many steps."""


class StalenessConfig(Section):
    budget: NonNegativeInt | Literal["auto"] = 2
    """eta: the largest staleness, in policy versions, that may enter an optimizer step. `auto`: the
    trainer tunes it while the run lasts, within `auto`'s limits."""
    auto: AutoBudgetConfig = AutoBudgetConfig()
    over_budget: OverBudget = OverBudget.MASK
    max_reissues: NonNegativeInt = 2
    """How often a task whose group was dropped as stale is tried again."""
    patience_seconds: NonNegativeFloat = 60.0
    """With `drop`: how long a batch is held for a running group that the next version would make
    stale. Without it, tasks that take longer than the budget allows would never be trained."""

    @property
    def first_budget(self) -> int:
        """The budget that a run begins with."""
        return self.auto.lowest if self.budget == "auto" else self.budget


class QueueConfig(Section):
    address: str = LOOPBACK_ANY_PORT
    """host:port; the service binds to it, nodes and trainer dial it."""
    page_address: str | None = None
    """host:port at which the service shows the run as a web page, read-only; by default none. Off
    loopback it takes the operator's token: `leeway page` prints a link."""
    redis_url: SecretStr | None = None
    """By default `REDIS_URL`, or else an embedded server."""
    redis_password_file: Path | None = None
    """Holds the password, so that it need not stand in redis_url."""
    lease_seconds: PositiveFloat = 60.0
    """A node that is silent for so long loses its work to another."""
    stall_seconds: PositiveFloat = 1800.0
    """A lease whose node reports no new token for so long is taken away although the node lives."""
    max_attempts: PositiveInt = 3
    max_bytes: PositiveInt = 4 << 30
    """Payload bytes the queue may hold; beyond, admission pauses and pushes are held back."""
    max_message_bytes: PositiveInt = 64 << 20
    filter_equal_scores: bool = True
    """End groups whose scores are all equal: they carry no signal for group-relative advantages."""
    filter_longer_than: PositiveInt | None = None
    """End groups in which a response has more tokens than this; by default none."""
    group_release: Literal["complete", "streaming"] = "complete"
    """`streaming`: trajectories are queued and trained as they complete, each a group of its own,
    so that none waits for the slowest answer to its prompt; for advantages that do not compare
    the answers to a prompt (trainer.algorithm.advantage.baseline=none)."""
    min_group: PositiveInt | None = None
    """Fewest trajectories a group may be trained with after failures; by default all."""
