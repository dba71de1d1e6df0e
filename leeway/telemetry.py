"""Structured logs, metrics, and the names of waits.

Every wait in Leeway has a deadline and a name. `Waits` holds what a process waits for right now and
since when; heartbeats, `leeway status` and the metrics show it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from prometheus_client import Counter

from leeway import health
from leeway.config import TelemetryConfig
from leeway.errors import ConfigError
from leeway.traces import TRACES

WAIT_SECONDS = Counter(
    "leeway_wait_seconds_total", "Seconds this process stood still, by what it waited for", ["what"]
)


def setup(config: TelemetryConfig, **identity: str) -> None:
    """Configures logs (to stderr) and opens the endpoint of metrics and probes if there is one.

    Args:
        identity: Bound to every line: run, role, node.
    """
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if config.log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(**identity)
    if config.traces_endpoint is not None:
        TRACES.open(config.traces_endpoint, config.traces_ratio, **identity)
    # Of the ranks on one machine, the first speaks for all.
    if config.metrics_address is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        host, _, port = config.metrics_address.rpartition(":")
        try:
            health.serve(host, int(port))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"telemetry.metrics_address = {config.metrics_address!r}: {error}"
            ) from error


class Waits:
    """What one process (or one loop of it) waits for, and since when. The newest wait counts."""

    def __init__(self) -> None:
        self._stack: list[tuple[str, float]] = []

    @contextmanager
    def waiting_for(self, kind: str, detail: str = "") -> Iterator[None]:
        """Marks the enclosed block as a wait.

        Args:
            kind: A short constant ("batch", "weights", "admission"): the metric's label.
            detail: What a person wants to know ("3 of 8 groups are complete").
        """
        entry = (f"{kind}: {detail}" if detail else kind, time.monotonic())
        self._stack.append(entry)
        try:
            yield
        finally:
            self._stack.remove(entry)
            WAIT_SECONDS.labels(kind).inc(time.monotonic() - entry[1])

    def current(self) -> tuple[str, float]:
        """(what, seconds); ("", 0.0) when nothing is waited for."""
        if not self._stack:
            return "", 0.0
        what, since = self._stack[-1]
        return what, time.monotonic() - since


class Spans:
    """A timeline of what one process did, one JSON line a span: who was busy while whom.

    `path` None records nothing. Times are seconds of the machine's wall clock, so that the files of
    several processes of one machine lie on one axis.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file = path.open("a", buffering=1) if path is not None else None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Records the enclosed block."""
        start = time.time()
        try:
            yield
        finally:
            self.record(name, start, time.time())

    def record(self, name: str, start: float, end: float) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"name": name, "start": start, "end": end}) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
