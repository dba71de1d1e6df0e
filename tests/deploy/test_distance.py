"""What distance costs: the quickstart's job over two clusters, with and without delay and loss."""

from __future__ import annotations

import os
import statistics
from typing import Any

import pytest

from tests.deploy.two_clusters import DELAY_MS, LOSS_PERCENT, TwoClusters, installed, quickstart_job
from trajectory_queue.plan.recorded import elapsed_seconds

LINKS = {"near": (0, 0), "far": (DELAY_MS, LOSS_PERCENT)}
# Answers become shorter while the model learns, most of all at first.
LEARNING = 15
# Steps until what was generated over the other link has been trained: the budget.
SETTLING, MEASURED = 2, 6


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_distance_costs_little_throughput() -> None:
    """Steps a second, in turns and mirrored: what changes with time weighs on both alike."""
    if os.environ.get("LEEWAY_NAMESPACES") != "full":
        pytest.skip("takes a quarter of an hour: make namespaces")
    seconds: dict[str, list[float]] = {name: [] for name in LINKS}
    with installed(quickstart_job) as clusters:
        clusters.await_steps(LEARNING, "the first of what there is to learn", 600)
        for name in 2 * ("far", "near", "near", "far"):
            rows = _steps_over(clusters, *LINKS[name])
            own = [elapsed_seconds(row) for row in rows]
            waits = sum(row["wait_seconds"] for row in rows)
            print(f"{name}: {sum(own):.1f} s, of which the trainer waits {waits:.1f} s", flush=True)
            seconds[name] += own
    ratio = sum(seconds["near"]) / sum(seconds["far"])
    near, far = (statistics.median(seconds[name]) for name in ("near", "far"))
    print(f"far/near {ratio:.3f}; of medians {near / far:.3f}")
    assert ratio >= 0.95


def _steps_over(clusters: TwoClusters, delay: int, loss: int) -> list[dict[str, Any]]:
    clusters.link.say(f"delay {delay}")
    clusters.link.say(f"loss {loss}")
    clusters.await_steps(SETTLING, "settling", 600)
    before = len(clusters.steps())
    clusters.await_steps(MEASURED, "measured steps", 600)
    return clusters.steps()[before : before + MEASURED]
