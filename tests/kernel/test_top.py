"""`leeway top` shows what a running system does, and says so when it cannot know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.widgets import DataTable, Static

from leeway.top import Top
from leeway.v1 import queue_pb2 as pb

STEP = {
    "kind": "step",
    "step": 7,
    "reward_mean": 0.5,
    "tokens_per_second": 1200.0,
    "tokens_trained": 1000,
    "tokens_masked": 50,
    "staleness_mean": 1.5,
    "staleness_max": 2,
    "staleness_in_flight_mean": 0.5,
    "staleness_in_queue_mean": 1.0,
    "step_seconds": 4.0,
    "wait_seconds": 1.0,
    "publish_seconds": 0.1,
    "effective_sample_size": 0.4,
    "alerts": ["effective_sample_size"],
}


def status() -> pb.StatusResponse:
    return pb.StatusResponse(
        run_id="run",
        version=7,
        budget=2,
        batch_groups=8,
        groups={"waiting": 30, "running": 12, "queued": 4, "leased": 2},
        counters={"tokens": 5000},
        step_metrics={
            name: value for name, value in STEP.items() if isinstance(value, int | float)
        },
        nodes=[
            pb.NodeStatus(node_id="a", version=6, leases=3),
            pb.NodeStatus(node_id="b", version=7, waiting_for="admission", waiting_seconds=4),
        ],
        trainer_waiting_for="a batch: 2 of 8 groups are complete",
        trainer_waiting_seconds=3,
    )


async def read() -> pb.StatusResponse:
    return status()


async def changes() -> list[pb.AuditRecord]:
    reason = "auto (both sides wait for it 12% of the time)"
    return [pb.AuditRecord(at_seconds=60, actor=reason, what="budget 1 -> 2")]


@pytest.mark.parametrize("width", [60, 140])
async def test_who_waits_for_whom_and_why(tmp_path: Path, width: int) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(json.dumps(STEP) + "\n")
    app = Top(metrics, read, changes)
    async with app.run_test(size=(width, 50)) as pilot:
        await pilot.pause()
        waits = str(app.query_one("#waits", Static).render())
        assert "a batch: 2 of 8 groups" in waits
        assert "2, 1 waiting" in waits and "for admission" in waits
        staleness = str(app.query_one("#staleness", Static).render())
        assert "places: 18 of 24 (75%)" in staleness
        assert "in flight 0.50, in queue 1.00" in staleness
        assert "LOOK AT: effective_sample_size" in str(app.query_one("#trainer", Static).render())
        decided = str(app.query_one("#changes", Static).render())
        assert "budget 1 -> 2, by auto (both sides wait for it 12% of the time)" in decided
        nodes = app.query_one("#nodes", DataTable)
        assert [nodes.get_row_at(row)[:3] for row in range(2)] == [
            ["a", "6", "1"],
            ["b", "7", "0"],
        ]
        await pilot.press("q")


async def test_another_machine_sees_the_newest_step(tmp_path: Path) -> None:
    app = Top(tmp_path / "metrics.jsonl", read, changes)
    async with app.run_test() as pilot:
        await pilot.pause()
        shown = str(app.query_one("#trainer", Static).render())
        assert "step 7" in shown and "reward 0.500" in shown and "1,200 tokens/s" in shown


async def test_a_queue_that_does_not_answer_is_named(tmp_path: Path) -> None:
    async def silent() -> None:
        return None

    async def nothing() -> list[pb.AuditRecord]:
        return []

    app = Top(tmp_path / "metrics.jsonl", silent, nothing)
    async with app.run_test() as pilot:
        await pilot.pause()
        assert "does not answer" in str(app.query_one("#waits", Static).render())
