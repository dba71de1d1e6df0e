"""The queue's Prometheus metrics: the ledger as it is, and how the service's event loop fares.

The ledger's numbers are read from the store now and then, whichever service changed them; every
service of a run exports the same. docs/queue.md explains each, with the bound at which a person
should look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from prometheus_client import Gauge, Histogram
from prometheus_client.core import REGISTRY, CounterMetricFamily, GaugeMetricFamily, Metric

from leeway.versions import capacity
from trajectory_queue.commands import Report

LOOP_LAG_MAX = Gauge(
    "leeway_queue_loop_lag_max_seconds", "The longest the event loop was late since the start"
)
LOOP_LAG = Histogram(
    "leeway_queue_loop_lag_seconds",
    "How late the event loop was",
    buckets=(0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
)
_LAG_PERIOD_SECONDS = 0.02

# Groups and trajectories per node, version lag and so on: name, help.
_GAUGES: Mapping[str, str] = {
    "version": "The trainer's version",
    "incarnation": "Lives of the trainer so far",
    "budget": "Staleness budget eta in force, in versions",
    "outstanding_groups": "Training groups running, queued or leased",
    "capacity_groups": "The most that may be outstanding: (eta + 1) * B",
    "payload_bytes": "Bytes of trajectories held",
    "oldest_queued_seconds": "How long the next group to be trained has waited",
    "trainer_waiting_seconds": "How long the trainer has waited for its batch; 0 when it does not",
    "nodes": "Rollout nodes seen within ten minutes",
    "nodes_wanted": "Rollout nodes that would keep the trainer busy and themselves loaded",
    "node_version_lag_max": "The trainer's version minus the oldest node's",
    "paused": "1 while an operator holds admission back",
}


class LedgerCollector:
    """Exports the newest report it was given. Register one a process."""

    def __init__(self) -> None:
        self._report: Report | None = None
        self._nodes_wanted = 0

    def update(self, report: Report, nodes_wanted: int) -> None:
        self._report, self._nodes_wanted = report, nodes_wanted

    def collect(self) -> Iterator[Metric]:
        report = self._report
        if report is None:
            return
        groups = GaugeMetricFamily(
            "leeway_queue_groups", "Groups by lane and state", labels=["lane", "state"]
        )
        for lane, states in (("train", report.groups), ("eval", report.eval_groups)):
            for state, count in states.items():
                groups.add_metric([lane, state], count)
        yield groups
        yield CounterMetricFamily(
            "leeway_queue_enqueued_groups", "Training groups enqueued", report.enqueued
        )
        events = CounterMetricFamily(
            "leeway_queue_events", "What happened, by kind", labels=["event"]
        )
        for name, count in report.counters.items():
            events.add_metric([name], count)
        yield events
        values = _values(report)
        if self._nodes_wanted:
            values["nodes_wanted"] = self._nodes_wanted
        for name, value in values.items():
            yield GaugeMetricFamily(f"leeway_queue_{name}", _GAUGES[name], value)


def _values(report: Report) -> dict[str, float]:
    oldest = min((node.version for node in report.nodes), default=report.version)
    return {
        "version": report.version,
        "incarnation": report.incarnation,
        "budget": report.budget,
        "outstanding_groups": sum(report.groups[s] for s in ("running", "queued", "leased")),
        "capacity_groups": capacity(report.budget, report.batch_groups),
        "payload_bytes": report.payload_bytes,
        "oldest_queued_seconds": report.oldest_queued_ms / 1000,
        "trainer_waiting_seconds": report.trainer_waiting_ms / 1000,
        "nodes": len(report.nodes),
        "node_version_lag_max": report.version - oldest,
        "paused": float(report.paused),
    }


async def watch_loop() -> None:
    """Measures how late the event loop runs what is due. Runs for ever."""
    loop = asyncio.get_running_loop()
    worst = 0.0
    while True:
        due = loop.time() + _LAG_PERIOD_SECONDS
        await asyncio.sleep(_LAG_PERIOD_SECONDS)
        lag = max(0.0, loop.time() - due)
        LOOP_LAG.observe(lag)
        if lag > worst:
            worst = lag
            LOOP_LAG_MAX.set(worst)


COLLECTOR = LedgerCollector()
REGISTRY.register(COLLECTOR)
