"""A node on a real queue and broadcast, with a workflow that sees what is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path

from benchmarks.fleet import RUN
from leeway import rpc
from leeway.config import Config, QueueConfig, RolloutConfig, StalenessConfig, TrainerConfig
from leeway.telemetry import Spans
from rollout_service.engines.stored_weights import load_weights
from rollout_service.engines.torch_engine import TorchEngine
from rollout_service.node import RolloutNode
from rollout_service.receiver import PolicyReceiver
from rollout_service.workflows.base import Event, Finished, Generated, Sample
from tests import tiny
from tests.queue.cases import configuration, serving, task, trajectory
from tests.weights.support import publisher
from trajectory_queue.client import OperatorQueue, RolloutQueue, TrainerQueue

GROUPS = 20
DEADLINE = 30.0


class Slow:
    """Samples take 20 ms each and then are whole."""

    def __init__(self) -> None:
        self.under_way = self.most = 0

    async def run(
        self, samples: Sequence[Sample], tell: Callable[[Event], Awaitable[None]]
    ) -> None:
        self.under_way += len(samples)
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.02)
        for sample in samples:
            self.under_way -= 1
            await tell(Generated(sample))
            await tell(Finished(sample, trajectory(sample.task, sample.index)))

    async def abort(self, sample_ids: Collection[str]) -> None: ...

    def progress(self, sample_ids: Collection[str]) -> int:
        return 0


async def roll_out(directory: Path, concurrency: int) -> int:
    """The most samples under way at once while groups of two are rolled out."""
    model = tiny.build(directory / "model")
    workflow, stop = Slow(), asyncio.Event()

    def configured(queue: QueueConfig) -> Config:
        return configuration(
            directory,
            queue=queue,
            rollout=RolloutConfig(concurrency=concurrency),
            staleness=StalenessConfig(budget=1),
            trainer=TrainerConfig(batch_groups=GROUPS // 2),
        )

    config = configured(QueueConfig())
    engine = TorchEngine(model, concurrency=concurrency)
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
                node = RolloutNode(
                    configured(QueueConfig(address=address)),
                    "node",
                    engine,
                    RolloutQueue(channel, "node"),
                    receiver,
                    workflow,
                    Spans(None),
                )
                async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
                    tasks.create_task(node.run(stop))
                    while dict((await operator.status()).groups).get("queued") != GROUPS:
                        await asyncio.sleep(0.02)
                    stop.set()
    await engine.close()
    return workflow.most


async def test_no_more_is_under_way_than_the_concurrency_says(tmp_path: Path) -> None:
    """An idle node took a whole batch, and one that had just leased counted too late."""
    assert 6 <= await roll_out(tmp_path, concurrency=7) <= 7


async def test_a_group_larger_than_the_concurrency_runs_by_itself(tmp_path: Path) -> None:
    assert await roll_out(tmp_path, concurrency=1) == 2
