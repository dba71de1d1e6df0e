"""Feeds trackers without waiting for them: each has a thread and a bounded queue of rows.

A tracker that raises, hangs or falls behind loses rows, which is logged and counted; training and
metrics.jsonl know nothing of it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import structlog
from prometheus_client import Counter

from trainer_service.trackers.base import Tracker

log = structlog.get_logger(__name__)

FAILURES = Counter("leeway_tracker_failures_total", "Rows that a tracker did not take", ["tracker"])
_MOST_ROWS = 1000
CLOSE_SECONDS = 10.0
"""How long all trackers together may take for what is still to be written."""

Row = tuple[int, Mapping[str, float]]
Opener = Callable[[int], Tracker]
"""Opens a tracker whose first row is of this step."""


class Trackers:
    """All trackers of a run, by their names. Without any it does nothing."""

    def __init__(self, openers: Mapping[str, Opener]) -> None:
        self._feeds = [_Feed(name, opener) for name, opener in openers.items()]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for feed in self._feeds:
            feed.put((step, metrics))

    def close(self) -> None:
        deadline = time.monotonic() + CLOSE_SECONDS
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.join(deadline - time.monotonic())


class _Feed:
    def __init__(self, name: str, opener: Opener) -> None:
        self._name = name
        self._opener = opener
        self._tracker: Tracker | None = None
        self._rows: queue.Queue[Row] = queue.Queue(_MOST_ROWS)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._failed(f"it is {_MOST_ROWS} rows behind")

    def end(self) -> None:
        self._ending.set()

    def join(self, seconds: float) -> None:
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._failed(f"not closed within {CLOSE_SECONDS:g} s")

    def _run(self) -> None:
        while not self._ending.is_set() or not self._rows.empty():
            try:
                step, metrics = self._rows.get(timeout=0.1)
            except queue.Empty:
                continue
            self._guarded(partial(self._take, step, metrics))
        if self._tracker is not None:
            self._guarded(self._tracker.close)

    def _take(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._tracker is None:
            self._tracker = self._opener(step)
        self._tracker.log(step, metrics)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            # The boundary to other people's code: whatever it was costs a row, never a step.
            self._failed(repr(error))

    def _failed(self, reason: str) -> None:
        FAILURES.labels(self._name).inc()
        log.warning("tracker failed", tracker=self._name, reason=reason)
