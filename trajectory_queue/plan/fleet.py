"""Rollout nodes in virtual time: continuous batching, tools, new weights in the middle of answers.

A node's sequences decode side by side at one common speed, which falls with their number. So one
clock a node is enough, `progress`: decoding seconds that every sequence has had since the node
began. A stretch of decoding ends at a known progress, however often the speed changes before.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from trajectory_queue.plan.profile import Rollouts
from trajectory_queue.plan.workload import Part, Work


@dataclass(slots=True, eq=False)
class Held:
    """A lease of a node; `open`: samples that have not been pushed."""

    lease_id: str
    task_id: str
    attempt: int
    open: int
    ended: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample on a node, in its part number `at`."""

    held: Held
    index: int
    work: Work
    at: int = 0
    since: float = 0.0
    """The node's progress at the start of the part."""
    versions: dict[int, float] = field(default_factory=dict)
    """Tokens of each version."""

    @property
    def part(self) -> Part:
        return self.work.parts[self.at]


class _Swap(NamedTuple):
    version: int
    progress: float


class Node:
    """One node. The simulation calls `advance` before it changes anything."""

    def __init__(self, number: int, rollouts: Rollouts) -> None:
        self.node_id = f"node-{number}"
        self.alive = True
        self.waits = False
        """For an answer to its request for tasks."""
        self.unfinished = 0
        self.held: dict[str, Held] = {}
        self.stamp = 0
        """Changes whenever the next end of a part does: what was announced before is void."""
        self.pending: int | None = None
        """A version that waits until nothing runs (update_mode = drain)."""
        self.busy_seconds = 0.0
        """In which at least one sequence decoded."""
        self.slot_seconds = 0.0
        """Decoding, summed over sequences."""
        self._slowdown = rollouts.slowdown
        self._decoding: list[tuple[float, int, Sequence]] = []
        self._count = 0
        self._progress = 0.0
        self._now = 0.0
        self._still_until = 0.0
        self._swaps = [_Swap(0, 0.0)]

    @property
    def version(self) -> int:
        return self._swaps[-1].version

    def advance(self, now: float) -> None:
        seconds = now - max(self._now, self._still_until)
        self._now = max(self._now, now)
        running = len(self._decoding)
        if seconds <= 0.0 or not running:
            return
        self._progress += seconds * self._speed(running)
        self.busy_seconds += seconds
        self.slot_seconds += seconds * running

    def decode(self, sequence: Sequence) -> None:
        """Begins the sequence's part, its time away being over."""
        sequence.since = self._progress
        self._count += 1
        ends = self._progress + sequence.part.decode_seconds
        heapq.heappush(self._decoding, (ends, self._count, sequence))

    def next_end(self) -> float | None:
        """When the next part ends if nothing changes before."""
        if not self._decoding:
            return None
        left = self._decoding[0][0] - self._progress
        start = max(self._now, self._still_until)
        return start + max(left, 0.0) / self._speed(len(self._decoding))

    def ended(self) -> Iterator[Sequence]:
        """Those whose part ends now; each is charged to the versions that decoded it."""
        while self._decoding and self._decoding[0][0] <= self._progress + 1e-9:
            ends, _, sequence = heapq.heappop(self._decoding)
            self._charge(sequence, ends)
            yield sequence

    def swap(self, version: int, still_seconds: float) -> None:
        """New weights are in place after the node has stood still."""
        self._swaps.append(_Swap(version, self._progress))
        self._still_until = max(self._now, self._still_until) + still_seconds
        self.pending = None
        # Only what a sequence on the node may have begun under is needed.
        oldest = min((sequence.since for _, _, sequence in self._decoding), default=self._progress)
        while len(self._swaps) > 1 and self._swaps[1].progress <= oldest:
            del self._swaps[0]

    def generated_tokens(self) -> float:
        """Of the sequences that decode now, in their present parts: what an interruption reads."""
        return sum(
            (self._progress - sequence.since)
            / max(sequence.part.decode_seconds, 1e-9)
            * sequence.part.tokens
            for _, _, sequence in self._decoding
        )

    def drop(self, held: Held) -> None:
        """Aborts what the lease still runs."""
        self._decoding = [entry for entry in self._decoding if entry[2].held is not held]
        heapq.heapify(self._decoding)
        self.unfinished -= held.open
        self.held.pop(held.lease_id, None)
        held.ended, held.open = True, 0

    def _speed(self, running: int) -> float:
        return 1.0 / (1.0 + self._slowdown * (running - 1))

    def _charge(self, sequence: Sequence, ends: float) -> None:
        part = sequence.part
        seconds = max(part.decode_seconds, 1e-9)
        for swap in reversed(self._swaps):
            begun = max(swap.progress, sequence.since)
            share = (ends - begun) / seconds
            if share > 0.0 or not sequence.versions:
                tokens = part.tokens * max(share, 0.0)
                sequence.versions[swap.version] = sequence.versions.get(swap.version, 0.0) + tokens
            ends = min(ends, begun)
            if swap.progress <= sequence.since:
                break
