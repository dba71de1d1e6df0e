"""The number of nodes wanted follows who waits for whom, and only what nodes can help."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trajectory_queue import commands as c
from trajectory_queue.fleet_size import WINDOW, FleetSize


def report(nodes: int, load: float, waits: bool, **changes: Any) -> c.Report:
    given: dict[str, Any] = {
        "run_id": "run",
        "version": 1,
        "incarnation": 1,
        "budget": 2,
        "batch_groups": 8,
        "groups": {state.value: 8 for state in c.State},
        "enqueued": 64,
        "eval_groups": {},
        "counters": {},
        "payload_bytes": 0,
        "nodes": tuple(
            c.NodeReport(f"node-{index}", 1, 4, "", 0, 1000, round(100 * load))
            for index in range(nodes)
        ),
        "trainer_waiting_ms": 500 if waits else 0,
        "trainer_has": 0,
        "trainer_wants": 8,
        "oldest_queued_ms": 0,
        "paused": False,
        "draining": False,
        "step_metrics": "",
    }
    return c.Report(**{**given, **changes})


def after(size: FleetSize, *pattern: c.Report, seconds: int = WINDOW) -> int:
    for second in range(seconds):
        size.observe(pattern[second % len(pattern)])
    return size.wanted


def test_a_starved_trainer_wants_as_many_as_would_feed_it() -> None:
    waiting, busy = report(6, 1.0, True), report(6, 1.0, False)
    assert after(FleetSize(), waiting, busy, busy, busy) == 8
    assert after(FleetSize(), waiting) == 12, "at most twice as many at a time"


def test_nodes_that_have_room_are_not_multiplied() -> None:
    assert after(FleetSize(), report(6, 0.4, True)) == 6


def test_a_fleet_that_the_budget_holds_back_wants_fewer() -> None:
    assert after(FleetSize(), report(10, 0.45, False)) == 5
    assert after(FleetSize(), report(10, 0.0, False)) == 1
    assert after(FleetSize(), report(10, 0.95, False)) == 10


def test_a_new_fleet_is_judged_by_itself() -> None:
    size = FleetSize()
    assert after(size, report(6, 1.0, True)) == 12
    assert after(size, report(7, 1.0, True), seconds=30) == 12, "it has shown nothing yet"
    assert after(size, report(12, 0.95, False)) == 12


def test_a_pause_says_nothing_and_the_silent_do_not_count() -> None:
    size = FleetSize()
    assert after(size, report(6, 0.0, False, paused=True)) == 0
    gone = tuple(c.NodeReport(f"node-{index}", 1, 0, "", 0, 120_000, 100) for index in range(6))
    assert after(size, replace(report(0, 0.0, True), nodes=gone)) == 1


def test_each_change_has_its_reason() -> None:
    size = FleetSize()
    decisions = [size.observe(report(4, 1.0, True)) for _ in range(WINDOW)]
    (decision,) = [each for each in decisions if each is not None]
    assert decision.nodes == 8 and "waits 100% of its time" in decision.reason
