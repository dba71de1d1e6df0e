"""How many rollout nodes a run wants: for autoscalers (`leeway_queue_nodes_wanted`) and people.

A state machine without I/O; the service shows it the ledger's report once a second. What holds:

- More nodes are wanted when the trainer waits for its batch while the fleet is loaded: a trainer
  that waits w of its time gets 1 - w of what it could use, so that n / (1 - w) nodes would do. A
  trainer that waits while nodes have room waits for the budget, or for tasks: nodes cannot help.
- Fewer are wanted when the trainer does not wait and the fleet is not loaded: as many as would be,
  at `_LOADED`.
- Every count is judged over a window of its own: after nodes came or went, what was wanted stays
  until the fleet has shown what it does.

An autoscaler adds its own limits and patience (the rollout chart's `autoscaling`).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from trajectory_queue.commands import Report

WINDOW = 300
"""Reports, one a second, that a judgement is over."""
_LEAST = 60
_ALIVE_MS = 60_000
"""A node that was silent for so long does not count; heartbeats come every few seconds."""
_LOADED = 0.9
# Shares of time: what the trainer may wait without anybody being asked for.
_WAITS = 0.02
_MOST_GROWTH = 2


@dataclass(frozen=True, slots=True)
class Wanted:
    nodes: int
    reason: str


class FleetSize:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.wanted = 0
        """0 before there is anything to go by."""
        self._nodes = 0
        # Of each report: whether the trainer waited, and the fleet's load.
        self._seen: deque[tuple[bool, float]] = deque(maxlen=WINDOW)

    def observe(self, report: Report) -> Wanted | None:
        """What is wanted from now on, if that is new."""
        alive = [node for node in report.nodes if node.seen_ms_ago < _ALIVE_MS]
        if len(alive) != self._nodes or report.paused or report.draining:
            self._seen.clear()
            self._nodes = len(alive)
        if report.paused or report.draining:
            return None
        if not alive:
            return None if self.wanted else self._want(1, "there is no node")
        load = sum(node.load_percent for node in alive) / (100 * len(alive))
        self._seen.append((report.trainer_waiting_ms > 0, load))
        return self._judge() if len(self._seen) >= _LEAST else None

    def _judge(self) -> Wanted | None:
        count, nodes = len(self._seen), self._nodes
        waits = sum(waited for waited, _ in self._seen) / count
        starved = sum(waited and load >= _LOADED for waited, load in self._seen) / count
        load = sum(load for _, load in self._seen) / count
        if starved > _WAITS:
            more = nodes / max(1.0 - starved, 1.0 / _MOST_GROWTH)
            return self._want(
                math.ceil(round(more, 6)),
                f"the trainer waits {starved:.0%} of its time for a loaded fleet",
            )
        if waits <= _WAITS and load < _LOADED:
            fewer = max(1, math.ceil(round(nodes * load / _LOADED, 6)))
            return self._want(fewer, f"the trainer is busy and the fleet loaded to {load:.0%}")
        return self._want(nodes, "the fleet fits")

    def _want(self, nodes: int, reason: str) -> Wanted | None:
        if nodes == self.wanted:
            return None
        self.wanted = nodes
        return Wanted(nodes, reason)
