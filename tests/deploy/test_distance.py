"""What distance costs: the quickstart's job over two clusters, with and without delay and loss."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.deploy.two_clusters import DELAY_MS, LOSS_PERCENT, TwoClusters, installed, quickstart_job
from trajectory_queue.plan.recorded import elapsed_seconds

LINKS = {"near": (0, 0), "far": (DELAY_MS, LOSS_PERCENT)}
# Steps until what was generated over the other link has been trained: the budget, and one.
SETTLING, MEASURED = 3, 6


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_distance_costs_little_throughput() -> None:
    """Trained tokens a second, alternating, so that answers that change weigh on both alike."""
    if os.environ.get("LEEWAY_NAMESPACES") != "full":
        pytest.skip("takes a quarter of an hour: make namespaces")
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in LINKS}
    with installed(quickstart_job) as clusters:
        for name in ("far", "near", "near", "far", "far", "near"):
            rows = _steps_over(clusters, *LINKS[name])
            print(name, f"{_speed(rows):.1f} tokens/s", flush=True)
            measured[name] += rows
    ratio = _speed(measured["far"]) / _speed(measured["near"])
    print(f"far/near {ratio:.3f}")
    assert ratio >= 0.95


def _steps_over(clusters: TwoClusters, delay: int, loss: int) -> list[dict[str, Any]]:
    clusters.link.say(f"delay {delay}")
    clusters.link.say(f"loss {loss}")
    clusters.await_steps(SETTLING, "settling", 600)
    before = len(clusters.steps())
    clusters.await_steps(MEASURED, "measured steps", 600)
    return clusters.steps()[before : before + MEASURED]


def _speed(rows: list[dict[str, Any]]) -> float:
    return float(sum(row["tokens_trained"] for row in rows) / sum(map(elapsed_seconds, rows)))
