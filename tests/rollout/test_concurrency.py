"""`rollout.concurrency: auto` finds what an engine can run, and keeps to it."""

from __future__ import annotations

import pytest

from leeway.config import AutoConcurrencyConfig
from rollout_service.concurrency import AdaptiveConcurrency
from rollout_service.engines.base import EngineLoad

GROUP = 4
ROOM = EngineLoad(kv_use=0.2, waiting=0, preemptions=0)


def limits(**changes: float) -> AutoConcurrencyConfig:
    return AutoConcurrencyConfig.model_validate({"lowest": 8, "highest": 64, **changes})


def full(controller: AdaptiveConcurrency) -> int:
    return controller.limit - controller.limit % GROUP


def test_it_grows_by_steps_up_to_the_highest_while_the_node_is_full() -> None:
    controller = AdaptiveConcurrency(limits(highest=30), GROUP)
    seen = [controller.limit]
    for _ in range(6):
        controller.observe(ROOM, full(controller))
        seen.append(controller.limit)
    assert seen == [8, 16, 24, 30, 30, 30, 30]


def test_a_node_that_has_room_is_not_given_more() -> None:
    controller = AdaptiveConcurrency(limits(), GROUP)
    assert controller.observe(ROOM, controller.limit - GROUP) is None


def test_a_full_cache_holds_it() -> None:
    controller = AdaptiveConcurrency(limits(), GROUP)
    assert controller.observe(EngineLoad(0.85, 0, 0), full(controller)) is None
    assert controller.observe(EngineLoad(0.84, 0, 0), full(controller)) is not None


@pytest.mark.parametrize(
    ("load", "reason"),
    [(EngineLoad(0.5, 3, 0), "3 wait in it"), (EngineLoad(0.5, 0, 2), "preempted 2")],
)
def test_overload_is_answered_once_until_it_has_drained(load: EngineLoad, reason: str) -> None:
    controller = AdaptiveConcurrency(limits(), GROUP)
    controller.limit = 60
    change = controller.observe(load, 60)
    assert change is not None and change.limit == 42 and reason in change.reason
    assert controller.observe(EngineLoad(0.5, load.waiting, load.preemptions), 56) is None
    # Drained, and the engine is still given too much: it goes on down, never below the lowest.
    waiting = EngineLoad(0.5, 1, load.preemptions)
    for _ in range(20):
        controller.observe(waiting, controller.limit)
    assert controller.limit == 8
    assert controller.observe(waiting, 8) is None


def test_it_hovers_about_what_an_engine_can_run() -> None:
    controller = AdaptiveConcurrency(limits(highest=1000), GROUP)
    capacity, under_way, seen = 100, 0, []
    for _ in range(200):
        # Ten sequences end between two looks; the node fills up to its limit.
        under_way = max(under_way - 10, full(controller))
        controller.observe(EngineLoad(0.5, max(0, under_way - capacity), 0), under_way)
        seen.append(controller.limit)
    assert min(seen[50:]) >= 0.65 * capacity
    assert max(seen[50:]) <= capacity + 8
