"""A node on a real queue and broadcast, with a workflow that sees what is under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet import RUN
from leeway import rpc
from leeway.config import QueueConfig, RolloutConfig, StalenessConfig, TrainerConfig
from leeway.telemetry import Spans
from rollout_service.engines.stored_weights import load_weights
from rollout_service.engines.torch_engine import TorchEngine
from rollout_service.node import RolloutNode
from rollout_service.receiver import PolicyReceiver
from rollout_service.workflows.base import Event, Finished, Generated, Sample
from tests import tiny
from tests.queue.cases import configuration, serving, task, trajectory
from tests.waiting import eventually
from tests.weights.support import publisher
from trajectory_queue.client import OperatorQueue, RolloutQueue, TrainerQueue

GROUPS = 20
DEADLINE = 30.0


class Slow:
    """Samples take 20 ms each and then are whole; `goes_on` lets them end."""

    def __init__(self) -> None:
        self.under_way = self.most = 0
        self.goes_on = asyncio.Event()
        self.gets_on = True
        self._begun: set[str] = set()
        self._beats = 0

    async def run(
        self, samples: Sequence[Sample], tell: Callable[[Event], Awaitable[None]]
    ) -> None:
        self._begun.update(sample.sample_id for sample in samples)
        self.under_way += len(samples)
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.02)
        await self.goes_on.wait()
        for sample in samples:
            self.under_way -= 1
            await tell(Generated(sample))
            await tell(Finished(sample, trajectory(sample.task, sample.index)))

    async def abort(self, sample_ids: Collection[str]) -> None: ...

    def progress(self, sample_ids: Collection[str]) -> int:
        """More each time, as long as it gets on."""
        self._beats += self.gets_on
        return self._beats if self._begun & set(sample_ids) else 0


@asynccontextmanager
async def rolling_out(
    directory: Path, stall_seconds: float = 60.0, **rollout: Any
) -> AsyncIterator[tuple[Slow, OperatorQueue, asyncio.Event]]:
    """A node that leases from a queue of groups of two; setting the event drains it."""
    model = tiny.build(directory / "model")
    workflow, stop = Slow(), asyncio.Event()
    config = configuration(
        directory,
        rollout=RolloutConfig(**rollout),
        staleness=StalenessConfig(budget=1),
        queue=QueueConfig(stall_seconds=stall_seconds),
        trainer=TrainerConfig(batch_groups=GROUPS // 2),
    )
    engine = TorchEngine(model, concurrency=config.rollout.most_concurrency)
    async with serving(config) as address, rpc.connect(address, config.security) as channel:
        trainer, operator = TrainerQueue(channel, "trainer"), OperatorQueue(channel, "operator")
        await trainer.resume(0)
        await trainer.enqueue([task(number) for number in range(GROUPS)])
        with publisher() as broadcast:
            weights = load_weights(model)
            broadcast.publish(0, weights.items(), None)
            async with rpc.connect(broadcast.address, config.security) as weights_channel:
                receiver = PolicyReceiver(
                    weights_channel,
                    engine,
                    node_id="node",
                    run_id=RUN,
                    mode=config.rollout.update_mode,
                    config=config.weights,
                    initial=weights,
                )
                queue = config.queue.model_copy(update={"address": address})
                node = RolloutNode(
                    config.model_copy(update={"queue": queue}),
                    "node",
                    engine,
                    RolloutQueue(channel, "node"),
                    receiver,
                    workflow,
                    Spans(None),
                )
                async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
                    tasks.create_task(node.run(stop))
                    yield workflow, operator, stop
                    stop.set()
    await engine.close()


async def until(operator: OperatorQueue, **groups: int) -> None:
    """So many groups of each state are in the queue."""

    async def met() -> bool:
        return groups.items() <= (await operator.status()).groups.items()

    await eventually(met, str(groups), DEADLINE)


async def most_at_once(directory: Path, **rollout: Any) -> int:
    """Samples, while all groups are rolled out."""
    async with rolling_out(directory, **rollout) as (workflow, operator, _):
        workflow.goes_on.set()
        await until(operator, queued=GROUPS)
        return workflow.most


@pytest.mark.parametrize("ahead", [0, 3])
async def test_no_more_is_under_way_than_the_concurrency_says(tmp_path: Path, ahead: int) -> None:
    """An idle node took a whole batch, and one that had just leased counted too late."""
    assert 6 <= await most_at_once(tmp_path, concurrency=7, prefetch_groups=ahead) <= 7


async def test_a_group_larger_than_the_concurrency_runs_by_itself(tmp_path: Path) -> None:
    assert await most_at_once(tmp_path, concurrency=1) == 2


async def test_groups_are_leased_ahead_and_given_back_when_the_node_ends(tmp_path: Path) -> None:
    lease = QueueConfig().lease_seconds
    settings = {"concurrency": 6, "prefetch_groups": 2, "drain_seconds": lease}
    async with rolling_out(tmp_path, **settings) as (workflow, operator, stop):
        await until(operator, running=5)
        assert workflow.under_way == 6
        stop.set()
        # Long before the leases would have expired.
        await until(operator, running=3)
        workflow.goes_on.set()


async def test_a_lease_that_waits_for_a_place_stalls_only_with_its_node(tmp_path: Path) -> None:
    """It has no token of its own, however long the answers before it take."""
    stall = 0.5
    settings = {"concurrency": 2, "prefetch_groups": 1, "heartbeat_seconds": 0.05}
    async with rolling_out(tmp_path, stall, **settings) as (workflow, operator, _):

        async def reasons() -> list[str]:
            """Of the task that is under way, and of the one that waits."""
            held = [await operator.inspect(f"train-{number}") for number in range(2)]
            return [reason for each in held for reason in each.reasons]

        async def stalled() -> bool:
            return len(await reasons()) == 2

        await until(operator, running=2)
        await asyncio.sleep(3 * stall)
        assert await reasons() == []
        workflow.gets_on = False
        await eventually(stalled, "both are taken away")
        assert all("stalled" in reason for reason in await reasons())
        # Other nodes may have them, and so may this one.
        workflow.gets_on = True
        workflow.goes_on.set()
        await until(operator, queued=GROUPS)
