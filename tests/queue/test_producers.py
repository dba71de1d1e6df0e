"""Trajectories from elsewhere: tasks that producers open; on every ledger, and over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leeway import rpc
from leeway.algorithm import AlgorithmConfig
from leeway.config import (
    Config,
    OverBudget,
    QueueConfig,
    RunConfig,
    SamplingConfig,
    SecurityConfig,
    TrainerConfig,
)
from leeway.errors import WireError
from leeway.v1 import queue_pb2 as pb
from leeway.v1 import queue_pb2_grpc
from leeway.v1 import trajectory_pb2 as domain
from tests.queue.cases import (
    Driver,
    configuration,
    entry,
    group_of,
    new_task,
    serving,
    task,
    trajectory,
)
from trajectory_queue import commands as c
from trajectory_queue.client import FailureKind, Lease, OperatorQueue, RolloutQueue, TrainerQueue
from trajectory_queue.commands import Failure, Wait
from trajectory_queue.producer import ProducerQueue

EXAMPLE = Path(__file__).parents[2] / "examples" / "stream_in.py"

# The rules, on every ledger ----------------------------------------------------------------------


def opening(number: int, *, node: str = "shop", version: int = 0, **changes: Any) -> c.Open:
    return c.Open(node, version, new_task(number, external=True, **changes))


async def test_a_task_is_opened_with_its_lease_and_trained(queue: Driver) -> None:
    await queue.start()
    opened = await queue.apply(opening(0))
    (lease,) = opened.leases
    assert (lease.lease_id, lease.attempt) == ("open/t0", 1)
    await queue.complete(lease)
    assert (await queue.report()).groups["queued"] == 1
    await queue.apply(opening(1))
    assert [group.task_id for group in (await queue.batch(0, groups=1)).groups] == ["t0"]


async def test_opening_again_gives_the_lease_that_is_held_to_its_holder_alone(
    queue: Driver,
) -> None:
    await queue.start()
    first = await queue.apply(opening(0))
    assert await queue.apply(opening(0)) == first
    other = await queue.apply(opening(0, node="another"))
    assert (other.leases, other.wait) == ((), Wait.KNOWN)
    await queue.complete(first.leases[0])
    done = await queue.apply(opening(0))
    assert (done.leases, done.wait) == ((), Wait.KNOWN)
    assert (await queue.report()).enqueued == 1


async def test_the_budget_admits_producers_as_it_admits_nodes(queue: Driver) -> None:
    await queue.start(tasks=3, budget=1, batch_groups=2)
    assert len((await queue.lease(3)).leases) == 3
    assert len((await queue.apply(opening(10))).leases) == 1
    refused = await queue.apply(opening(11))
    assert (refused.leases, refused.wait) == ((), Wait.BUDGET)
    assert (refused.outstanding, refused.capacity) == (4, 4)
    # What was not admitted is no task of the run.
    assert (await queue.report()).enqueued == 4


async def test_traffic_of_old_weights_is_told_what_it_needs(queue: Driver) -> None:
    await queue.start(tasks=2, budget=0)
    for lease in (await queue.lease()).leases:
        await queue.complete(lease)
    await queue.step(0)
    refused = await queue.apply(opening(10))
    assert (refused.wait, refused.needs_version) == (Wait.VERSION, 1)
    assert len((await queue.apply(opening(10, version=1))).leases) == 1


@pytest.mark.parametrize("how", ["fail", "expire", "give back", "refuse"])
async def test_it_has_one_attempt_and_frees_its_place(queue: Driver, how: str) -> None:
    """No node could make the trajectory, so nobody is asked to."""
    await queue.start(budget=0, batch_groups=1)
    (lease,) = (await queue.apply(opening(0))).leases
    if how == "fail":
        await queue.apply(c.Fail("shop", lease.lease_id, Failure.INFRASTRUCTURE, "cut off"))
    elif how == "expire":
        queue.backend.now += 1_100
        assert (await queue.apply(c.Expire())).count == 1
    elif how == "give back":
        await queue.apply(c.GiveBack("shop", lease.lease_id, ()))
    else:
        assert (await queue.push(entry(lease.lease_id, "t0", 5))).refused
    report = await queue.report()
    assert (report.groups["dead"], report.groups["waiting"]) == (1, 0)
    assert (await queue.lease()).wait is Wait.NO_TASK
    assert (await queue.apply(c.Requeue((), "operator"))).count == 0
    assert len((await queue.apply(opening(1))).leases) == 1


async def test_what_is_dropped_as_stale_is_not_issued_again(queue: Driver) -> None:
    await queue.start(tasks=1, budget=1, batch_groups=1, over_budget=OverBudget.DROP)
    (lease,) = (await queue.apply(opening(10))).leases
    await queue.complete(lease)
    await queue.apply(c.SetBudget(0, "operator"))
    await queue.apply(c.Resume("trainer", 0, 1, vocabulary=100))
    queue.incarnation += 1
    assert (await queue.batch(1)).groups == ()
    report = await queue.report()
    assert (report.groups["stale"], report.groups["waiting"]) == (1, 1)


async def test_a_paused_run_opens_nothing(queue: Driver) -> None:
    await queue.start()
    await queue.apply(c.Pause(True, "operator"))
    assert (await queue.apply(opening(0))).wait is Wait.PAUSED
    await queue.apply(c.Pause(False, "operator"))
    await queue.apply(c.Drain("operator"))
    assert (await queue.apply(opening(0))).run_finished


# Over gRPC ---------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "hello"}]


@contextlib.asynccontextmanager
async def roles(tmp_path: Path, **sections: Any) -> AsyncIterator[tuple[str, Callable[[str], Any]]]:
    """A service that asks for tokens; its address, and a channel for each role."""
    keys = tmp_path / "keys"
    keys.mkdir()
    for role in ("trainer", "rollout", "operator", "producer"):
        (keys / role).write_text(f"{role:x<40}")
    security = SecurityConfig(accepted_tokens=keys)
    config = configuration(tmp_path, security=security, **sections)
    async with serving(config) as address, contextlib.AsyncExitStack() as stack:

        async def channel(role: str) -> Any:
            client = SecurityConfig(token_file=keys / role)
            return await stack.enter_async_context(rpc.connect(address, client))

        yield address, channel


async def test_a_producer_goes_all_the_way(tmp_path: Path) -> None:
    async with roles(tmp_path) as (_, channel):
        trainer = TrainerQueue(await channel("trainer"), "trainer")
        await trainer.resume(0)
        producer = ProducerQueue(await channel("producer"), "shop")
        assert await producer.version() == 0
        opened = await producer.open_task("chat-1", MESSAGES, version=0, columns={"user": 7})
        assert opened.lease is not None
        asked = opened.lease.task
        # The run's own terms.
        assert (asked.group_size, asked.sampling.max_new_tokens) == (2, 8)
        async with producer.keeping(opened.lease, 0):
            sent = group_of(asked)
            assert not (await producer.push(opened.lease, sent)).refused
        again = await producer.push(opened.lease, sent)
        assert again.duplicates == ("chat-1/0", "chat-1/1")
        assert (await producer.open_task("chat-1", MESSAGES, version=0)).known
        batch = await trainer.lease_batch(version=0, groups=1, deadline_seconds=5)
        for before, after in zip(sent, batch.groups[0].trajectories, strict=True):
            assert before.to_wire() == after.to_wire()


async def test_a_producer_waits_for_its_place(tmp_path: Path) -> None:
    async with roles(tmp_path) as (_, channel):
        trainer = TrainerQueue(await channel("trainer"), "trainer")
        await trainer.resume(0)
        producer = ProducerQueue(await channel("producer"), "shop")
        for number in range(4):
            opened = await producer.open_task(f"chat-{number}", MESSAGES, version=0)
            assert opened.lease is not None
            await producer.push(opened.lease, group_of(opened.lease.task))
        late = await producer.open_task("chat-4", MESSAGES, version=0, wait_seconds=0.1)
        assert late.lease is None
        assert late.waiting_for.startswith("the staleness budget: 4 of 4 groups")
        waiting = asyncio.create_task(
            producer.open_task("chat-4", MESSAGES, version=1, wait_seconds=30)
        )
        batch = await trainer.lease_batch(version=0, groups=2, deadline_seconds=5)
        await trainer.commit(batch, version=1)
        async with asyncio.timeout(10):
            assert (await waiting).lease is not None


async def test_the_door_refuses_a_producer_as_it_refuses_nodes(tmp_path: Path) -> None:
    async with roles(tmp_path) as (_, channel):
        await TrainerQueue(await channel("trainer"), "trainer").resume(0)
        producer = ProducerQueue(await channel("producer"), "shop")
        opened = await producer.open_task("chat-1", MESSAGES, version=0)
        assert opened.lease is not None
        bad = trajectory(opened.lease.task, 0, version=9)
        (refusal,) = (await producer.push(opened.lease, [bad])).refused
        assert refusal.field == "versions"
        operator = OperatorQueue(await channel("operator"))
        (dead,) = await operator.dead()
        assert dead.task_id == "chat-1"
        assert "refused: versions = 9" in dead.reasons[0]


async def test_a_producer_reaches_nothing_that_nodes_generate(tmp_path: Path) -> None:
    async with roles(tmp_path) as (_, channel):
        trainer = TrainerQueue(await channel("trainer"), "trainer")
        await trainer.resume(0)
        await trainer.enqueue([task(0)])
        node = RolloutQueue(await channel("rollout"), "node")
        (lease,) = (
            await node.lease_tasks(version=0, max_groups=1, wait_seconds=0, request_id="r")
        ).leases
        producer = ProducerQueue(await channel("producer"), "node")
        for trick in (lease, _renamed(lease, "open/chat-9"), _renamed(lease, "")):
            with pytest.raises(WireError, match="a producer may use the leases that OpenTask gave"):
                await producer.push(trick, [trajectory(lease.task, 0)])
        with pytest.raises(WireError, match="a producer may use the leases"):
            await producer.fail(lease, FailureKind.DATA, "gone")
        with pytest.raises(WireError, match="permission_denied"):
            thief = RolloutQueue(await channel("producer"), "thief")
            await thief.lease_tasks(version=0, max_groups=1, wait_seconds=0, request_id="s")
        with pytest.raises(WireError, match="permission_denied"):
            await ProducerQueue(await channel("rollout"), "node").open_task(
                "chat-1", MESSAGES, version=0
            )
        assert (await node.extend(version=0, progress={lease.lease_id: 1})) == []


def _renamed(lease: Lease, lease_id: str) -> Lease:
    return dataclasses.replace(lease, lease_id=lease_id)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 3}, "group_size = 3: the run's groups have 2"),
        ({"sampling": domain.Sampling(temperature=0.5, top_p=1, max_new_tokens=8)}, "the run's is"),
        ({"purpose": domain.PURPOSE_EVAL}, "open training tasks"),
        ({"messages_json": "[]"}, "give at least one message"),
        ({"task_id": ""}, "give every task an id"),
    ],
)
async def test_a_task_on_other_terms_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    values = {"task_id": "chat-1", "messages_json": json.dumps(MESSAGES), **changes}
    request = pb.OpenTaskRequest(producer_id="shop", task=domain.Task(**values))
    async with roles(tmp_path) as (_, channel):
        stub = queue_pb2_grpc.TrajectoryQueueStub(await channel("producer"))
        with pytest.raises(WireError, match=message):
            await rpc.call(stub.OpenTask, request, what="open a task", deadline_seconds=10)


# As a program ------------------------------------------------------------------------------------


def _row(number: int, **changes: Any) -> str:
    answer = {"token_ids": [4, 5, 6], "logprobs": [-0.5] * 3, "version": 0, "finish": "stop"}
    answers = [{**answer, "reward": 0.5 + number, **changes}]
    prompt = [1, 2, number]
    row = {"id": f"chat-{number}", "messages": MESSAGES, "prompt_ids": prompt, "answers": answers}
    return json.dumps(row) + "\n"


async def test_traffic_streams_in_while_training_goes_on(tmp_path: Path) -> None:
    """The example, in a process of its own, in front of a queue that others use as well."""
    sections = {
        "sampling": SamplingConfig(group_size=1, max_new_tokens=8),
        "trainer": TrainerConfig(
            batch_groups=2,
            algorithm=AlgorithmConfig.model_validate(
                {"advantage": {"baseline": "none", "normalise": "batch"}}
            ),
        ),
        "queue": QueueConfig(lease_seconds=1.0),
    }
    async with roles(tmp_path, **sections) as (address, channel):
        trainer = TrainerQueue(await channel("trainer"), "trainer")
        await trainer.resume(0)
        program = await asyncio.create_subprocess_exec(
            sys.executable,
            str(EXAMPLE),
            str(_config_file(tmp_path, address)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert program.stdin is not None
        assert program.stdout is not None
        try:
            async with asyncio.timeout(60):
                rows = [_row(number) for number in range(4)] + [_row(4, version=1)]
                program.stdin.write("".join(rows).encode())
                for number in range(4):
                    assert (
                        await program.stdout.readline() == f"chat-{number} streamed in\n".encode()
                    )
                # Four are in the budget of two batches; the fifth waits for the trainer.
                batch = await trainer.lease_batch(version=0, groups=2, deadline_seconds=5)
                assert [group.task.task_id for group in batch.groups] == ["chat-0", "chat-1"]
                (first,) = batch.groups[0].trajectories
                np.testing.assert_array_equal(first.token_ids, [1, 2, 0, 4, 5, 6])
                assert first.reward == 0.5
                await trainer.commit(batch, version=1)
                assert await program.stdout.readline() == b"chat-4 streamed in\n"
                batch = await trainer.lease_batch(version=1, groups=2, deadline_seconds=5)
                await trainer.commit(batch, version=2)
                # Sent twice, as after a restart of the program.
                program.stdin.write(_row(4, version=1).encode())
                assert (await program.stdout.readline()).startswith(b"chat-4 left out: ")
                program.stdin.write(_row(6, version=7).encode())
                assert b"the newest published version is 2" in await program.stdout.readline()
                program.stdin.close()
                assert await program.wait() == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                program.kill()
            await program.wait()
        operator = OperatorQueue(await channel("operator"))
        groups = (await operator.status()).groups
        assert (groups["committed"], groups["queued"], groups["dead"]) == (4, 1, 1)


async def test_a_producer_that_is_killed_costs_its_open_task_alone(tmp_path: Path) -> None:
    async with roles(tmp_path, queue=QueueConfig(lease_seconds=0.5)) as (_, channel):
        await TrainerQueue(await channel("trainer"), "trainer").resume(0)
        producer = ProducerQueue(await channel("producer"), "shop")
        kept = await producer.open_task("kept", MESSAGES, version=0)
        left = await producer.open_task("left", MESSAGES, version=0)
        assert kept.lease is not None
        assert left.lease is not None
        operator = OperatorQueue(await channel("operator"))
        async with asyncio.timeout(20), producer.keeping(kept.lease, 0):
            while not (dead := await operator.dead()):
                await asyncio.sleep(0.05)
            assert [(d.task_id, *d.reasons) for d in dead] == [
                ("left", "infrastructure: node shop fell silent; lease expired")
            ]
            assert not (await producer.push(kept.lease, group_of(kept.lease.task))).refused
        late = await producer.push(left.lease, group_of(left.lease.task))
        assert late.duplicates == ("left/0", "left/1")


def _config_file(tmp_path: Path, address: str) -> Path:
    config = Config.model_validate(
        {
            "run": RunConfig(name="producer", directory=tmp_path),
            "model": {"path": "unused"},
            "task": {"jsonl": "unused", "reward": "unused:unused"},
            "queue": {"address": address},
            "security": {"token_file": tmp_path / "keys" / "producer"},
        }
    )
    path = tmp_path / "producer.yaml"
    path.write_text(config.to_yaml())
    return path
