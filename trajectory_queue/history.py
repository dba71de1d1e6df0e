"""What the queue service remembers of the last hours for its page: a bounded ring in memory.

The service adds what the ledger reports once a second, the page's threads read. Any service of a
run remembers the same from its start on: the ledger holds what the trainer reported.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from leeway.v1 import queue_pb2 as pb
from leeway.versions import capacity

SAMPLE_SECONDS = 5.0
SAMPLES_KEPT = 720
"""An hour."""
STEPS_KEPT = 500


@dataclass(frozen=True, slots=True)
class View:
    """What a page shows.

    Attributes:
        status: None before the ledger was read.
        age_seconds: Of the status.
        pushed_per_second: Tokens, lately.
        samples: One every `SAMPLE_SECONDS`, oldest first; `minute` is 0 now and negative before.
        steps: The trainer's, oldest first.
    """

    status: pb.StatusResponse | None
    age_seconds: float
    changes: Sequence[pb.AuditRecord]
    pushed_per_second: float
    samples: Sequence[Mapping[str, float]]
    steps: Sequence[Mapping[str, float]]


class History:
    """Safe to use from any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._status: pb.StatusResponse | None = None
        self._changes: Sequence[pb.AuditRecord] = ()
        self._at = now()
        self._samples: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=SAMPLES_KEPT)
        self._steps: dict[int, Mapping[str, float]] = {}
        # The counters of tokens at the newest sample: pushed, trained.
        self._counted: tuple[float, int, int] | None = None

    def add(self, status: pb.StatusResponse, changes: Sequence[pb.AuditRecord]) -> None:
        now = self._now()
        with self._lock:
            self._status, self._changes, self._at = status, changes, now
            metrics = dict(status.step_metrics)
            if "step" in metrics:
                # A resumed trainer does again what came after.
                earlier = [step for step in self._steps.items() if step[0] < metrics["step"]]
                newest = (int(metrics["step"]), metrics)
                self._steps = dict([*earlier, newest][-STEPS_KEPT:])
            if self._counted is None or now - self._counted[0] >= SAMPLE_SECONDS:
                self._sample(status, now)

    def view(self) -> View:
        now = self._now()
        with self._lock:
            samples = [{**values, "minute": (at - now) / 60} for at, values in self._samples]
            return View(
                self._status,
                now - self._at,
                self._changes,
                samples[-1].get("pushed", 0.0) if samples else 0.0,
                samples,
                list(self._steps.values()),
            )

    def _sample(self, status: pb.StatusResponse, now: float) -> None:
        counters = status.counters
        pushed, trained = counters["tokens"], counters["tokens_trained"]
        idle = sum(bool(node.waiting_for) for node in status.nodes)
        states = ("running", "queued", "leased")
        values: dict[str, float] = {
            "outstanding": sum(status.groups[state] for state in states),
            "capacity": capacity(status.budget, status.batch_groups),
            "queued": status.groups["queued"],
            "running": status.groups["running"],
            "budget": status.budget,
            "nodes": len(status.nodes),
            "idle_nodes": idle,
            "trainer_waiting": status.trainer_waiting_seconds,
        }
        if self._counted is not None:
            seconds = now - self._counted[0]
            values["pushed"] = (pushed - self._counted[1]) / seconds
            values["trained"] = (trained - self._counted[2]) / seconds
        self._counted = now, pushed, trained
        self._samples.append((now, values))
