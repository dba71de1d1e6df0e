"""The service and its clients over real gRPC, on an embedded server."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
import redis

from leeway import rpc
from leeway.arrays import array_to_wire
from leeway.config import QueueConfig, SecurityConfig, StalenessConfig
from leeway.errors import (
    ConfigError,
    DeadlineError,
    FencedError,
    WireError,
)
from leeway.trajectory import FinishReason, Purpose
from leeway.v1 import queue_pb2 as pb
from leeway.v1 import queue_pb2_grpc
from leeway.versions import Staleness, VersionSpan
from tests.queue.cases import configuration, group_of, servers, serving, task, trajectory
from tests.waiting import eventually
from trajectory_queue import service
from trajectory_queue.client import (
    FailureKind,
    Lease,
    Leases,
    OperatorQueue,
    RolloutQueue,
    TrainerQueue,
)
from trajectory_queue.embedded import embedded
from trajectory_queue.main import serve


class Run:
    """Both sides of one queue."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub = queue_pb2_grpc.TrajectoryQueueStub(channel)
        self.trainer = TrainerQueue(channel, "trainer")
        self.node = RolloutQueue(channel, "node")
        self.operator = OperatorQueue(channel, "operator")
        self._requests = 0

    async def lease(
        self, most: int = 100, version: int = 0, wait: float = 0.0, node: str = ""
    ) -> Leases:
        self._requests += 1
        queue = RolloutQueue(self.channel, node) if node else self.node
        return await queue.lease_tasks(
            version=version,
            max_groups=most,
            wait_seconds=wait,
            request_id=f"request-{self._requests}",
        )

    async def complete(self, lease: Lease, **changes: object) -> None:
        result = await self.node.push(lease.lease_id, group_of(lease.task, **changes))
        assert not result.refused


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    config = configuration(tmp_path)
    async with serving(config) as address, rpc.connect(address, config.security) as channel:
        yield Run(channel)


async def test_a_batch_goes_all_the_way(run: Run) -> None:
    assert (await run.trainer.resume(0)).incarnation == 1
    tasks = [task(number) for number in range(6)]
    assert await run.trainer.enqueue(tasks) == 6
    assert await run.trainer.enqueue(tasks) == 0
    leased = await run.lease()
    assert [lease.task for lease in leased.leases] == tasks[:4]
    for lease in reversed(leased.leases):
        await run.complete(lease)
    batch = await run.trainer.lease_batch(version=0, groups=2, deadline_seconds=5)
    assert [group.task for group in batch.groups] == tasks[:2]
    assert [t.index for t in batch.groups[0].trajectories] == [0, 1]
    assert batch.staleness == (Staleness(0, 0), Staleness(0, 0))
    assert (batch.budget, batch.masked_tokens) == (1, 0)
    assert (await run.operator.status()).step_metrics == {}
    metrics = {"step": 1, "reward_mean": 0.5, "loss_sum": math.nan}
    assert await run.trainer.commit(batch, version=1, metrics=metrics) == 2
    assert await run.trainer.checkpointed(1) == 2
    status = await run.operator.status()
    assert status.step_metrics == {"step": 1, "reward_mean": 0.5}, "what is a number"
    assert (status.groups["committed"], status.groups["queued"]) == (2, 2)
    assert status.nodes[0].node_id == "node"


async def test_what_is_pushed_arrives_bit_by_bit(run: Run) -> None:
    await run.trainer.resume(0)
    await run.trainer.enqueue([task(0)])
    (lease,) = (await run.lease()).leases
    sent = [
        trajectory(
            lease.task,
            index,
            logprobs=np.float32([-0.1, 0.0, -3.5]),
            loss_mask=np.array([True, False, True]),
            length=3,
            finish_reason=FinishReason.LENGTH,
            extras={"routed": np.arange(6, dtype=np.uint8).reshape(3, 2)},
        )
        for index in range(2)
    ]
    await run.node.push(lease.lease_id, sent)
    batch = await run.trainer.lease_batch(version=0, groups=1, deadline_seconds=5)
    for before, after in zip(sent, batch.groups[0].trajectories, strict=True):
        assert before.to_wire() == after.to_wire()


async def test_groups_stream_while_the_batch_fills(run: Run) -> None:
    await run.trainer.resume(0)
    await run.trainer.enqueue([task(number) for number in range(2)])
    first, second = (await run.lease()).leases
    said: list[str] = []
    waiting = asyncio.create_task(
        run.trainer.lease_batch(version=0, groups=2, deadline_seconds=20, on_waiting=said.append)
    )
    await eventually(
        lambda: any(text.startswith("0 of 2") for text in said), "its first words", 10.0
    )
    await run.complete(first)
    await eventually(
        lambda: any(text.startswith("1 of 2") for text in said), "its next words", 10.0
    )
    assert (await run.operator.status()).trainer_waiting_for.startswith("a batch: 1 of 2")
    await run.complete(second)
    assert len((await waiting).groups) == 2


async def test_a_batch_survives_its_stream(run: Run) -> None:
    await run.trainer.resume(0)
    await run.trainer.enqueue([task(number) for number in range(2)])
    first, second = (await run.lease()).leases
    await run.complete(first)
    with pytest.raises(DeadlineError, match="1 of 2 groups are complete"):
        await run.trainer.lease_batch(version=0, groups=2, deadline_seconds=0.2)
    await run.complete(second)
    batch = await run.trainer.lease_batch(version=0, groups=2, deadline_seconds=5)
    assert [group.task.sequence for group in batch.groups] == [0, 1]


async def test_a_node_waits_for_room_and_gets_it_at_once(run: Run) -> None:
    await run.trainer.resume(0)
    await run.trainer.enqueue([task(number) for number in range(10)])
    for lease in (await run.lease()).leases:
        await run.complete(lease)
    waiting = asyncio.create_task(run.lease(version=1, wait=20))
    batch = await run.trainer.lease_batch(version=0, groups=2, deadline_seconds=5)
    assert not waiting.done()
    await run.trainer.commit(batch, version=1)
    async with asyncio.timeout(2):
        assert len((await waiting).leases) == 2


async def test_a_long_poll_ends_with_a_reason(run: Run) -> None:
    await run.trainer.resume(0)
    answer = await run.lease(wait=0.1)
    assert answer.waiting_for == "no task is waiting: the trainer has enqueued no more"
    await run.trainer.enqueue([task(number) for number in range(10)])
    await run.lease()
    answer = await run.lease(wait=0.1)
    assert answer.waiting_for.startswith("the staleness budget: 4 of 4 groups")
    await run.operator.pause()
    assert "paused" in (await run.lease()).waiting_for


async def test_old_weights_are_told_at_once(run: Run) -> None:
    await run.trainer.resume(7)
    await run.trainer.enqueue([task(0)])
    async with asyncio.timeout(2):
        answer = await run.lease(version=3, wait=30)
    assert (answer.needs_version, answer.leases) == (6, ())


REFUSALS: dict[str, Callable[[Lease], object]] = {
    "reward": lambda lease: trajectory(lease.task, 0, reward=None),
    "finish_reason": lambda lease: trajectory(lease.task, 0, finish_reason=FinishReason.UNFINISHED),
    "versions": lambda lease: trajectory(lease.task, 0, versions=(VersionSpan(-1, 6),)),
    "sampling": lambda lease: trajectory(
        lease.task, 0, sampling=dataclasses.replace(lease.task.sampling, top_k=5)
    ),
    "index": lambda lease: trajectory(lease.task, 2),
    "task_id": lambda lease: trajectory(task(99), 0),
}


@pytest.mark.parametrize("field", REFUSALS)
async def test_the_door_refuses_with_field_value_and_remedy(run: Run, field: str) -> None:
    await run.trainer.resume(0)
    await run.trainer.enqueue([task(0)])
    (lease,) = (await run.lease()).leases
    bad = REFUSALS[field](lease)
    (refusal,) = (await run.node.push(lease.lease_id, [bad])).refused  # type: ignore[list-item]
    assert refusal.field == field
    assert refusal.message.startswith(f"{field} = ")
    # The group does not hang: it is leased again.
    (again,) = (await run.lease()).leases
    assert again.attempt == 2


@pytest.mark.parametrize(
    ("value", "remedy"),
    [(np.nan, "must be finite"), (-9999.0, "a sentinel is not one"), (0.5, "lie in")],
)
async def test_logprobs_that_are_none_are_refused(run: Run, value: float, remedy: str) -> None:
    await run.trainer.resume(0)
    await run.trainer.enqueue([task(0)])
    (lease,) = (await run.lease()).leases
    message = trajectory(lease.task, 0).to_wire()
    message.logprobs.Clear()
    array_to_wire(np.full(6, value, dtype=np.float32), message.logprobs)
    answer = await run.stub.Push(
        pb.PushRequest(
            trajectories=[
                pb.PushedTrajectory(lease_id=lease.lease_id, trajectory=message.SerializeToString())
            ]
        )
    )
    (refusal,) = answer.refused
    assert refusal.field == "logprobs"
    assert remedy in refusal.message
    counters = (await run.operator.status()).counters
    assert (counters["refused"], counters["refused_logprobs"]) == (1, 1)


async def test_garbage_is_refused_not_crashed_on(run: Run) -> None:
    item = pb.PushedTrajectory(lease_id="?", trajectory=b"\xff\x00garbage")
    answer = await run.stub.Push(pb.PushRequest(trajectories=[item]))
    assert len(answer.refused) == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await run.stub.EnqueueTasks(pb.EnqueueTasksRequest(tasks=[{"task_id": ""}]))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_masked_tokens_do_not_reach_the_trainer(run: Run) -> None:
    await run.operator.set_budget(9)
    await run.trainer.resume(0)
    await run.trainer.enqueue([task(number) for number in range(6)])
    (slow, *_) = (await run.lease(1)).leases
    for version in range(2):
        (lease,) = (await run.lease(1, version=version)).leases
        await run.complete(lease, version=version)
        batch = await run.trainer.lease_batch(version=version, groups=1, deadline_seconds=5)
        await run.trainer.commit(batch, version=version + 1)
    mixed = (VersionSpan(0, 4), VersionSpan(1, 2))
    await run.complete(slow, versions=mixed)
    assert await run.operator.set_budget(1) == 9
    batch = await run.trainer.lease_batch(version=2, groups=1, deadline_seconds=5)
    assert batch.staleness == (Staleness(in_flight=1, in_queue=1),)
    assert batch.masked_tokens == 8
    for each in batch.groups[0].trajectories:
        assert each.loss_mask.tolist() == [False] * 4 + [True] * 2


async def test_partials_go_on_elsewhere(run: Run) -> None:
    await run.trainer.resume(0)
    await run.trainer.enqueue([task(0)])
    (lease,) = (await run.lease()).leases
    partial = trajectory(
        lease.task, 1, length=3, finish_reason=FinishReason.UNFINISHED, reward=None, score=None
    )
    await run.node.push(lease.lease_id, [trajectory(lease.task, 0)])
    await run.node.give_back(lease.lease_id, [partial])
    (again,) = (await run.lease(node="other")).leases
    assert again.done == {0}
    assert again.partials[0].to_wire() == partial.to_wire()


async def test_failures_and_the_dead(run: Run) -> None:
    await run.trainer.resume(0)
    await run.trainer.enqueue([task(0)])
    (lease,) = (await run.lease()).leases
    await run.node.fail(lease.lease_id, FailureKind.DATA, "the prompt is too long")
    (dead,) = await run.operator.dead()
    assert (dead.task_id, list(dead.reasons)) == ("train-0", ["data: the prompt is too long"])
    assert await run.operator.requeue() == 1
    assert len((await run.lease()).leases) == 1


async def test_inspect_shows_a_trajectory(run: Run) -> None:
    await run.trainer.resume(0)
    await run.trainer.enqueue([task(0)])
    (lease,) = (await run.lease()).leases
    await run.node.push(lease.lease_id, [trajectory(lease.task, 1)])
    found = await run.operator.inspect("train-0/1")
    assert (found.task_id, found.state) == ("train-0", "running")
    assert found.group.trajectories[0].index == 1
    with pytest.raises(WireError, match="no task or trajectory"):
        await run.operator.inspect("nobody")


async def test_a_superseded_trainer_is_fenced(run: Run) -> None:
    await run.trainer.resume(0)
    await run.trainer.enqueue([task(number) for number in range(2)])
    for lease in (await run.lease()).leases:
        await run.complete(lease)
    batch = await run.trainer.lease_batch(version=0, groups=2, deadline_seconds=5)
    newer = TrainerQueue(run.channel, "trainer")
    assert (await newer.resume(0)).incarnation == 2
    with pytest.raises(FencedError, match="current life is 2"):
        await run.trainer.commit(batch, version=1)
    with pytest.raises(FencedError):
        await run.trainer.lease_batch(version=0, groups=2, deadline_seconds=5)
    again = await newer.lease_batch(version=0, groups=2, deadline_seconds=5)
    assert [group.task for group in again.groups] == [group.task for group in batch.groups]


async def test_a_full_queue_holds_pushes_back_until_there_is_room(tmp_path: Path) -> None:
    config = configuration(tmp_path, queue=QueueConfig(max_bytes=1000))
    async with serving(config) as address, rpc.connect(address, config.security) as channel:
        run = Run(channel)
        await run.trainer.resume(0)
        await run.trainer.enqueue([task(number) for number in range(6)])
        first, second, third, _ = (await run.lease()).leases
        await run.complete(first, length=100)
        await run.complete(second, length=100)
        held = asyncio.create_task(run.complete(third))
        batch = await run.trainer.lease_batch(version=0, groups=2, deadline_seconds=5)
        assert "room: the queue holds" in (await run.lease()).waiting_for
        assert not held.done()
        await run.trainer.commit(batch, version=1)
        await run.trainer.checkpointed(1)
        async with asyncio.timeout(10):
            await held


async def test_a_checkpoint_lets_go_of_all_that_it_covers_a_few_at_a_time(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_FREED_AT_ONCE", 1)
    await run.trainer.resume(0)
    await run.trainer.enqueue([task(number) for number in range(2)])
    for lease in (await run.lease()).leases:
        await run.complete(lease)
    batch = await run.trainer.lease_batch(version=0, groups=2, deadline_seconds=5)
    await run.trainer.commit(batch, version=1)
    assert await run.trainer.checkpointed(1) == 2
    assert (await run.operator.status()).payload_bytes == 0


async def test_evaluation_beside_training(run: Run) -> None:
    await run.trainer.resume(0)
    tests = [task(number, purpose=Purpose.EVAL) for number in range(3)]
    await run.trainer.enqueue([*tests, *(task(number) for number in range(3))])
    for lease in (await run.lease(3)).leases:
        assert lease.task.purpose is Purpose.EVAL
        await run.complete(lease, score=1.0, reward=1.0)
    batch = await run.trainer.lease_batch(
        version=0,
        groups=0,
        deadline_seconds=5,
        purpose=Purpose.EVAL,
        task_ids=[test.task_id for test in tests],
    )
    assert [group.task for group in batch.groups] == tests
    assert await run.trainer.commit(batch, version=0) == 3


async def test_a_service_restarts_without_losing_anything(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    async with serving(config) as address, rpc.connect(address, config.security) as channel:
        run = Run(channel)
        await run.trainer.resume(0)
        await run.trainer.enqueue([task(number) for number in range(4)])
        first, second, *_ = (await run.lease()).leases
        await run.complete(first)
        before = await run.operator.status()
    async with serving(config) as address, rpc.connect(address, config.security) as channel:
        again = Run(channel)
        assert (await again.operator.status()).groups == before.groups
        # The node's lease outlived the service, and so did the trainer's life.
        await again.complete(second)
        run.trainer._stub = again.trainer._stub
        batch = await run.trainer.lease_batch(version=0, groups=2, deadline_seconds=5)
        assert len(batch.groups) == 2


async def test_two_services_share_one_redis(tmp_path: Path) -> None:
    with embedded(servers()["valkey"], tmp_path / "redis") as url:
        config = configuration(tmp_path, queue=QueueConfig(redis_url=url))
        async with (
            serving(config) as one,
            serving(config) as two,
            rpc.connect(one, config.security) as channel_one,
            rpc.connect(two, config.security) as channel_two,
        ):
            trainer, nodes = Run(channel_one).trainer, Run(channel_two)
            await trainer.resume(0)
            waiting = asyncio.create_task(nodes.lease(wait=20))
            await trainer.enqueue([task(number) for number in range(2)])
            async with asyncio.timeout(2):
                leases = (await waiting).leases
            filling = asyncio.create_task(
                trainer.lease_batch(version=0, groups=2, deadline_seconds=20)
            )
            for lease in leases:
                await nodes.complete(lease)
            async with asyncio.timeout(2):
                assert len((await filling).groups) == 2


async def test_a_server_that_evicts_or_forgets_is_refused(tmp_path: Path) -> None:
    with embedded(servers()["valkey"], tmp_path / "redis") as url:
        config = configuration(tmp_path, queue=QueueConfig(redis_url=url))
        with redis.Redis.from_url(url) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
            with pytest.raises(ConfigError, match="set `maxmemory-policy noeviction`"):
                await serve(config, stop=asyncio.Event())
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("appendonly", "no")
            with pytest.raises(ConfigError, match="set `appendonly yes`"):
                await serve(config, stop=asyncio.Event())


async def test_a_full_redis_is_back_pressure_not_a_crash(tmp_path: Path) -> None:
    with embedded(servers()["valkey"], tmp_path / "redis") as url:
        config = configuration(tmp_path, queue=QueueConfig(redis_url=url))
        async with serving(config) as address, rpc.connect(address, config.security) as channel:
            run = Run(channel)
            await run.trainer.resume(0)
            await run.trainer.enqueue([task(0)])
            (lease,) = (await run.lease()).leases
            with redis.Redis.from_url(url) as client:
                client.config_set("maxmemory", "1")
                held = asyncio.create_task(run.complete(lease))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await run.stub.EnqueueTasks(pb.EnqueueTasksRequest(tasks=[task(1).to_wire()]))
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                client.config_set("maxmemory", "0")
            async with asyncio.timeout(10):
                await held


async def test_a_token_is_asked_for(tmp_path: Path) -> None:
    config = configuration(tmp_path, security=SecurityConfig(token="secret"))
    async with serving(config) as address:
        async with rpc.connect(address, SecurityConfig()) as channel:
            with pytest.raises(WireError, match="unauthenticated"):
                await Run(channel).trainer.resume(0)
        async with rpc.connect(address, config.security) as channel:
            run = Run(channel)
            await run.trainer.resume(0)
            await run.trainer.enqueue([task(0)])
            (lease,) = (await run.lease()).leases
            await run.complete(lease)
            batch = await run.trainer.lease_batch(version=0, groups=1, deadline_seconds=5)
            assert len(batch.groups) == 1


async def test_an_open_address_without_security_is_refused(tmp_path: Path) -> None:
    config = configuration(tmp_path, queue=QueueConfig(address="0.0.0.0:0"))
    with pytest.raises(ConfigError, match="not loopback"):
        await serve(config, stop=asyncio.Event())


async def test_sync_mode_hands_out_batches_in_order(tmp_path: Path) -> None:
    config = configuration(tmp_path, staleness=StalenessConfig(budget=0))
    async with serving(config) as address, rpc.connect(address, config.security) as channel:
        run = Run(channel)
        await run.trainer.resume(0)
        await run.trainer.enqueue([task(number) for number in range(8)])
        for version in range(4):
            leases = (await run.lease(version=version, wait=5)).leases
            wanted = [2 * version, 2 * version + 1]
            assert [lease.task.sequence for lease in leases] == wanted
            for lease in reversed(leases):
                await run.complete(lease, version=version)
            batch = await run.trainer.lease_batch(version=version, groups=2, deadline_seconds=5)
            assert [group.task.sequence for group in batch.groups] == wanted
            await run.trainer.commit(batch, version=version + 1)
