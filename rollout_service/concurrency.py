"""`rollout.concurrency: auto`: how many sequences a node should have under way.

Additive increase, multiplicative decrease, as TCP does it (Chiu and Jain, 1989). A state machine
without I/O; the node shows it what the engine reports every few seconds. What holds:

- The limit stays between `lowest` and `highest`.
- It grows by `increase`, only while it is what holds the node back (as much is under way as may be)
  and the engine has room: nothing waits in it, and its KV cache is filled less than
  `highest_kv_use`.
- It is multiplied by `decrease` when the engine is given more than it can run at once: it preempted
  sequences, which are then computed again, or sequences wait in it. Then it is left alone until no
  more is under way than it says: the same overload is not answered twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from leeway.config import AutoConcurrencyConfig
from rollout_service.engines.base import EngineLoad


@dataclass(frozen=True, slots=True)
class Change:
    limit: int
    reason: str


class AdaptiveConcurrency:
    """See the module's docstring.

    Attributes:
        limit: Sequences that may be under way.
    """

    def __init__(self, config: AutoConcurrencyConfig, group_size: int) -> None:
        """`group_size`: so many are begun together; with less room than that the node is full."""
        self._config = config
        self._group_size = group_size
        self._preemptions = 0
        self._draining = False
        self.limit = config.lowest

    def observe(self, load: EngineLoad, under_way: int) -> Change | None:
        """The change to make, which is made; None to leave the limit as it is."""
        preempted, self._preemptions = load.preemptions - self._preemptions, load.preemptions
        self._draining = self._draining and under_way > self.limit
        if preempted > 0 or load.waiting > 0:
            if self._draining or self.limit == self._config.lowest:
                return None
            self._draining = True
            what = f"preempted {preempted}" if preempted > 0 else f"{load.waiting} wait in it"
            return self._change(int(self.limit * self._config.decrease), f"the engine: {what}")
        if self._draining or load.kv_use >= self._config.highest_kv_use:
            return None
        full = under_way > self.limit - self._group_size
        if not full or self.limit == self._config.highest:
            return None
        return self._change(
            self.limit + self._config.increase, f"full, and the KV cache is to {load.kv_use:.0%}"
        )

    def _change(self, limit: int, reason: str) -> Change:
        self.limit = min(max(limit, self._config.lowest), self._config.highest)
        return Change(self.limit, reason)
