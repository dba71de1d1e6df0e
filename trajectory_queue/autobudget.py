"""`staleness.budget: auto`: which budget the next batches should be checked under.

A state machine without I/O. The trainer's loop shows it every step and applies what it says;
`leeway plan` does the same in virtual time. What holds:

- The budget stays between `lowest` and `highest`, unless an operator set another; it changes by one
  decision at a time, and each says why.
- It is widened, by one, only when it is what both sides wait for: the trainer waits for a batch
  although as many groups are outstanding as may be. A trainer that waits for a fleet that is too
  small, or a fleet that waits for a busy trainer, would gain nothing but staleness.
- It is halved when off-policy health leaves its band. That budget and larger ones are then closed
  for `forget_steps`, and widening needs a margin: so the two never chase each other.
- After a change it is left alone until a batch's worth of data under it has come through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from leeway.config import AutoBudgetConfig

# Waiting is judged over so many steps: batches differ.
_WINDOW = 4


@dataclass(frozen=True, slots=True)
class Observation:
    """One step.

    Attributes:
        budget: In force.
        waiting_share: Of the step's time, in which the trainer waited for its batch.
        at_budget: Whether admission was at the budget while it did.
        health: The step's metrics; of those that are missing nothing is asked.
    """

    budget: int
    waiting_share: float
    at_budget: bool
    health: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Decision:
    budget: int
    reason: str


class BudgetController:
    """See the module's docstring."""

    def __init__(self, config: AutoBudgetConfig) -> None:
        self._config = config
        self._waits: deque[float] = deque(maxlen=_WINDOW)
        self._left_alone = 0
        self._closed_from: int | None = None
        self._closed_steps = 0

    def decide(self, seen: Observation) -> Decision | None:
        """The change to make after this step; None to leave the budget as it is."""
        self._waits.append(seen.waiting_share if seen.at_budget else 0.0)
        self._left_alone = max(0, self._left_alone - 1)
        self._closed_steps = max(0, self._closed_steps - 1)
        unhealthy = self._outside(seen.health, margin=0.0)
        if unhealthy:
            self._close(seen.budget)
            narrower = max(self._config.lowest, min(seen.budget // 2, self._config.highest))
            if narrower >= seen.budget:
                return None
            return self._change(narrower, unhealthy)
        if seen.budget > self._config.highest:
            return self._change(self._config.highest, "above staleness.auto.highest")
        if self._left_alone or len(self._waits) < _WINDOW:
            return None
        waiting = sum(self._waits) / _WINDOW
        wider = seen.budget + 1
        if waiting <= self._config.waiting_share or wider > self._config.highest:
            return None
        if self._closed_steps and self._closed_from is not None and wider >= self._closed_from:
            return None
        if self._outside(seen.health, margin=self._config.margin):
            return None
        return self._change(wider, f"both sides wait for it {waiting:.0%} of the time")

    def _change(self, budget: int, reason: str) -> Decision:
        self._waits.clear()
        self._left_alone = budget + 1
        return Decision(budget, reason)

    def _close(self, budget: int) -> None:
        if not self._closed_steps or self._closed_from is None or budget < self._closed_from:
            self._closed_from = budget
        self._closed_steps = self._config.forget_steps

    def _outside(self, health: Mapping[str, float], margin: float) -> str:
        """The first bound that health, held to it with a margin, violates; empty when none."""
        config = self._config
        lowest = config.lowest_sample_size + margin * (1.0 - config.lowest_sample_size)
        size = health.get("effective_sample_size", 1.0)
        if size < lowest:
            return f"effective_sample_size {size:.2f} below {lowest:.2f}"
        for name, bound in (
            ("chi2_token", config.highest_chi2),
            ("clip_fraction", config.highest_clip_fraction),
        ):
            highest = bound * (1.0 - margin)
            if health.get(name, 0.0) > highest:
                return f"{name} {health[name]:.2f} above {highest:.2f}"
        return ""
