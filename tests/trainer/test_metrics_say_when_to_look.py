"""A step's metrics: each is documented, alarms are logged, staleness is split in its two parts."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from leeway.algorithm import AlgorithmConfig
from leeway.trajectory import Trajectory
from leeway.versions import VersionSpan
from tests.trainer.trainer_cases import group, trajectory
from trainer_service.algorithms.critic import ValueLoss
from trainer_service.algorithms.diagnostics import ALERTS, TokenSums
from trainer_service.algorithms.objective import Objective
from trainer_service.learn import Learned
from trainer_service.packed import StepPlan
from trainer_service.record import Record, StepTimes
from trainer_service.trackers.feed import Trackers
from trajectory_queue.client import Batch, Untrained

DOCS = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
HEALTHY = TokenSums(
    tokens=10,
    masked_tokens=10,
    weight=10,
    weight_square=10,
    off_policy_square=10,
    ratio=10,
    entropy=10,
)


def written(run: Path, members: list[Trajectory], *sums: TokenSums) -> dict[str, Any]:
    """The row of the step that takes the trainer from version 5 to 6."""
    objectives = []
    for own in sums:
        objectives.append(Objective(AlgorithmConfig(), 5))
        objectives[-1].sums = own
    batch = Batch("b", (group(members),), (), 5, 0, Untrained(0, 0, 0.0))
    record = Record(run, Trackers({}))
    learned = Learned([], objectives, 0.5, 1e-3)
    record.step(record.measure(6, batch, learned, StepTimes()), batch, learned)
    record.close()
    return json.loads((run / "metrics.jsonl").read_text())


def test_every_metric_of_the_loss_is_documented() -> None:
    everything = TokenSums(**{field.name: 1.0 for field in fields(TokenSums)}).metrics()
    for name in everything:
        assert f"`{name}`" in DOCS, name
    assert set(ALERTS) <= set(everything)
    for name in (*ValueLoss(StepPlan((), 0, 0, 0, 0, 0), 0.5).metrics(), "critic_grad_norm"):
        assert f"`{name}`" in DOCS, name


def test_staleness_is_split_in_flight_and_in_queue(tmp_path: Path) -> None:
    spans = [(VersionSpan(2, 1), VersionSpan(4, 2)), (VersionSpan(5, 3),)]
    members = [
        replace(trajectory([1], [2, 3, 4], index=i, reward=1.0), versions=own)
        for i, own in enumerate(spans)
    ]
    row = written(tmp_path, members, HEALTHY)
    # The first token waited two versions for its trajectory's last; that one, one in the queue.
    assert row["staleness_in_flight_tokens"] == [5, 0, 1]
    assert row["staleness_in_queue_tokens"] == [3, 3]
    assert row["staleness_max"] == 3
    assert row["alerts"] == []


def test_what_is_outside_its_bounds_is_logged(tmp_path: Path) -> None:
    members = [trajectory([1], [2], index=i, reward=1.0) for i in range(2)]
    stale = replace(HEALTHY, weight_square=90.0, masked_tokens=11)
    with capture_logs() as logs:
        row = written(tmp_path, members, HEALTHY, stale)
    assert row["alerts"] == ["effective_sample_size", "poisoned_tokens"]
    assert row["effective_sample_size"] == pytest.approx(20**2 / (20 * 100))
    assert sorted(entry["metric"] for entry in logs) == row["alerts"]
