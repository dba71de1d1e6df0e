"""One trace a task, from lease to commit, across processes and clusters: OpenTelemetry over OTLP.

Nothing travels for it: the ids of a task's trace and of its first span are hashes of run and task,
which every process knows. Which tasks are traced follows from the trace's id as well: all processes
choose the same ones. Without `telemetry.traces_endpoint` nothing is recorded.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

import xxhash

from leeway.errors import ConfigError

FLUSH_SECONDS = 5.0
_SCOPE = "leeway"


@dataclass(frozen=True, slots=True)
class _Exporter:
    processor: Any
    resource: Any
    run: str
    ratio: float


class Traces:
    """What this process records of tasks."""

    def __init__(self) -> None:
        self._exporter: _Exporter | None = None

    def open(self, endpoint: str, ratio: float, run: str, **identity: str) -> None:
        """Begins to export.

        Args:
            identity: Attributes of every span: role, node.

        Raises:
            ConfigError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                "telemetry.traces_endpoint needs OpenTelemetry: `pip install 'leeway[deploy]'`"
            ) from error
        name = f"leeway-{identity.get('role', 'process')}"
        attributes = {f"leeway.{key}": value for key, value in {"run": run, **identity}.items()}
        self._exporter = _Exporter(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)),
            Resource.create({"service.name": name, **attributes}),
            run,
            ratio,
        )

    def close(self) -> None:
        """Sends what is left."""
        if self._exporter is not None:
            self._exporter.processor.force_flush(int(FLUSH_SECONDS * 1000))
            self._exporter.processor.shutdown()
            self._exporter = None

    def begin(self, task_id: str, name: str, **attributes: str | int | float) -> None:
        """Records the moment at which a task's trace begins: its first span, above all others."""
        now = time.time()
        self._record(task_id, name, now, now, attributes, first=True)

    def span(self, task_id: str, name: str, start: float, **attributes: str | int | float) -> None:
        """Records what was done for a task since `start` (seconds of the wall clock)."""
        self._record(task_id, name, start, time.time(), attributes, first=False)

    def _record(
        self,
        task_id: str,
        name: str,
        start: float,
        end: float,
        attributes: dict[str, str | int | float],
        *,
        first: bool,
    ) -> None:
        exporter = self._exporter
        if exporter is None:
            return
        trace, root = ids(exporter.run, task_id)
        if (trace & (2**64 - 1)) >= exporter.ratio * 2**64:
            return
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, TraceFlags

        sampled = TraceFlags(TraceFlags.SAMPLED)
        above = SpanContext(trace, root, is_remote=True, trace_flags=sampled)
        own = SpanContext(trace, secrets.randbits(64) or 1, is_remote=False, trace_flags=sampled)
        exporter.processor.on_end(
            ReadableSpan(
                name,
                context=above if first else own,
                parent=None if first else above,
                resource=exporter.resource,
                attributes={"leeway.task": task_id, **attributes},
                instrumentation_scope=InstrumentationScope(_SCOPE),
                start_time=int(start * 1e9),
                end_time=int(end * 1e9),
            )
        )


def ids(run: str, task_id: str) -> tuple[int, int]:
    """The ids of a task's trace (128 bits) and of its first span (64)."""
    name = f"{run}/{task_id}".encode()
    return xxhash.xxh3_128_intdigest(name) or 1, xxhash.xxh3_64_intdigest(name) or 1


TRACES = Traces()
"""This process's own."""
