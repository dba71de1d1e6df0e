"""A hundred simulated nodes and a trainer on the real service: what is promised, at scale."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from leeway import rpc
from leeway.algorithm import AdvantageConfig, AlgorithmConfig, Baseline, Normalise
from leeway.config import (
    Config,
    OverBudget,
    QueueConfig,
    RolloutConfig,
    SamplingConfig,
    StalenessConfig,
    TrainerConfig,
)
from leeway.errors import WireError
from leeway.trajectory import Trajectory
from tests.queue.cases import configuration, group_of, serving
from trajectory_queue.client import OperatorQueue, PushResult, RolloutQueue, TrainerQueue
from trajectory_queue.simulated import Learned, Speed, make_task, run_fleet, run_trainer

BATCH = 16


def simulated(directory: Path, policy: OverBudget, address: str = "127.0.0.1:0") -> Config:
    return configuration(
        directory,
        sampling=SamplingConfig(group_size=4, max_new_tokens=64),
        staleness=StalenessConfig(budget=2, over_budget=policy),
        trainer=TrainerConfig(batch_groups=BATCH, batch_seconds=2, checkpoint_every=4),
        rollout=RolloutConfig(concurrency=4, heartbeat_seconds=1),
        queue=QueueConfig(address=address, lease_seconds=10),
    )


async def train(config: Config, address: str, *, tasks: int, speed: Speed, step: float) -> Learned:
    dialled = config.model_copy(update={"queue": QueueConfig(address=address)})
    stop = asyncio.Event()
    fleet = asyncio.create_task(run_fleet(dialled, 100, "node", speed, stop))
    learned = await run_trainer(dialled, tasks=lambda: tasks, step_seconds=lambda _: step)
    async with asyncio.timeout(60):
        await fleet  # The run is finished: nodes end by themselves.
    return learned


@pytest.mark.parametrize("policy", [OverBudget.MASK, OverBudget.DROP])
async def test_every_task_ends_once_and_none_is_over_the_budget(
    tmp_path: Path, policy: OverBudget
) -> None:
    config = simulated(tmp_path, policy)
    async with serving(config) as address, rpc.connect(address, config.security) as channel:
        learned = await train(config, address, tasks=320, speed=Speed(failure_share=0.01), step=0.1)
        status = await OperatorQueue(channel).status()
    groups = dict(status.groups)
    trained = Counter(task for _, tasks in learned.steps for task in tasks)
    assert learned.over_budget == learned.corrupt == 0
    assert max(trained.values()) == 1
    assert len(trained) == groups["committed"]
    assert sum(groups.values()) == status.enqueued == 320
    assert sum(groups[s] for s in ("waiting", "running", "queued", "leased")) == 0
    assert status.payload_bytes == 0


class _Misunderstood(RolloutQueue):
    """A node's client whose pushes the queue refuses for good, as a service with a fault would."""

    async def push(self, lease_id: str, trajectories: Sequence[Trajectory]) -> PushResult:
        raise WireError("push trajectories to the queue: unknown")


async def test_a_node_that_the_queue_refuses_ends_and_keeps_no_lease(tmp_path: Path) -> None:
    """It would extend, for ever, a lease that it works on no longer."""
    config = simulated(tmp_path, OverBudget.MASK)
    async with serving(config) as address, rpc.connect(address, config.security) as channel:
        dialled = config.model_copy(update={"queue": QueueConfig(address=address)})
        trainer = TrainerQueue(channel, "trainer")
        await trainer.resume(0)
        await trainer.enqueue([make_task(number, config) for number in range(2)])
        async with asyncio.timeout(60):
            with pytest.raises(ExceptionGroup) as raised:
                await run_fleet(dialled, 1, "node", Speed(), asyncio.Event(), dial=_Misunderstood)
        assert raised.group_contains(WireError)


async def test_a_streamed_trajectory_does_not_wait_for_its_siblings(tmp_path: Path) -> None:
    """Of two answers to each prompt one is slow; the first batch is made of the quick ones."""
    config = configuration(
        tmp_path,
        sampling=SamplingConfig(group_size=2, max_new_tokens=64),
        trainer=TrainerConfig(
            batch_groups=2,
            algorithm=AlgorithmConfig(
                advantage=AdvantageConfig(baseline=Baseline.NONE, normalise=Normalise.BATCH)
            ),
        ),
        queue=QueueConfig(group_release="streaming"),
    )
    batch = config.queued_batch_groups
    async with serving(config) as address, rpc.connect(address, config.security) as channel:
        trainer, node = TrainerQueue(channel, "trainer"), RolloutQueue(channel, "node")
        await trainer.resume(0)
        await trainer.enqueue([make_task(number, config) for number in range(2 * batch)])
        leased = await node.lease_tasks(
            version=0, max_groups=2 * batch, wait_seconds=5, request_id="all"
        )
        assert len(leased.leases) == 2 * batch
        for lease in leased.leases[::2]:
            await node.push(lease.lease_id, group_of(lease.task))
        ready = await trainer.lease_batch(version=0, groups=batch, deadline_seconds=5)
    assert [group.task for group in ready.groups] == [lease.task for lease in leased.leases[::2]]


@pytest.mark.parametrize("policy", [OverBudget.MASK, OverBudget.DROP])
async def test_a_long_tail_is_neither_wasted_nor_starved(
    tmp_path: Path, policy: OverBudget
) -> None:
    """3% of tasks take six steps, with a budget of two."""
    step, median = 0.3, 24
    speed = Speed(
        median_tokens=median, sigma=0.3, tokens_per_second=median / (step / 2), slow_factor=12.0
    )
    config = simulated(tmp_path, policy)
    config = config.model_copy(
        update={"queue": config.queue.model_copy(update={"filter_equal_scores": False})}
    )
    tasks = 480
    async with serving(config) as address, rpc.connect(address, config.security) as channel:
        learned = await train(config, address, tasks=tasks, speed=speed, step=step)
        counters = (await OperatorQueue(channel).status()).counters
    slow = sum(speed.is_slow(make_task(number, config)) for number in range(tasks))
    names = [name for _, names in learned.steps for name in names]
    slow_trained = sum(speed.is_slow(make_task(int(name[-8:]), config)) for name in names)
    used = learned.tokens_trained / counters["tokens"]
    share = slow_trained / len(names) / (slow / tasks)
    print(f"{policy}: {used:.3f} of tokens used, slow tasks' share {share:.3f} of theirs, {slow=}")
    assert learned.over_budget == 0
    assert used >= 0.97
    assert abs(share - 1) <= 0.1
