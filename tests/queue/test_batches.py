"""What is recorded of a batch."""

from __future__ import annotations

from tests.queue.cases import task, trajectory
from trajectory_queue.batches import staleness_metrics


def test_what_is_newer_than_a_resumed_trainer_waited_for_no_version() -> None:
    one = task(0)
    older, newer = trajectory(one, 0, version=1, length=4), trajectory(one, 1, version=5, length=2)
    metrics = staleness_metrics([older, newer], trainer_version=3)
    assert metrics["staleness_in_queue_tokens"] == [2, 0, 4]
    assert metrics["staleness_max"] == 2
