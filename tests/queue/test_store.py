"""What is Redis' own: keys, the stream and its consumer group, restarts, scripts that got lost."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis

from leeway import rpc
from leeway.config import QueueConfig
from tests.queue.cases import (
    Driver,
    RedisBackend,
    configuration,
    group_of,
    names,
    servers,
    serving,
    settings,
    task,
)
from tests.waiting import children, eventually
from trajectory_queue import commands as c
from trajectory_queue.client import RolloutQueue, TrainerQueue
from trajectory_queue.embedded import embedded
from trajectory_queue.store import connect, open_store

BINARY = servers()["valkey"]


def server_in(directory: Path) -> psutil.Process:
    (server,) = children(os.getpid(), lambda command: str(directory) in "".join(command[-1:]))
    return server


async def pending(redis: RedisBackend) -> dict[bytes, int]:
    summary = await redis.client.xpending(f"{redis.prefix}trajectories", "trainers")
    return {each["name"]: int(each["pending"]) for each in summary["consumers"]}


async def test_entries_are_pending_until_the_commit_and_deleted_with_the_checkpoint(
    redis: RedisBackend,
) -> None:
    queue, stream = Driver(redis), f"{redis.prefix}trajectories"
    await queue.start(tasks=3)
    for lease in (await queue.lease()).leases:
        await queue.complete(lease)
    assert await redis.client.xlen(stream) == 3
    assert await pending(redis) == {}
    batch = await queue.batch(0)
    assert await pending(redis) == {b"trainer": 2}
    await queue.commit(batch, 1)
    assert await pending(redis) == {}
    assert await redis.client.xlen(stream) == 3
    await queue.apply(c.Checkpointed(queue.incarnation, 1))
    assert await redis.client.xlen(stream) == 1


async def test_nothing_stays_pending_when_a_trainer_comes_back_under_another_name(
    redis: RedisBackend,
) -> None:
    queue = Driver(redis)
    await queue.start(tasks=2)
    for lease in (await queue.lease()).leases:
        await queue.complete(lease)
    held = names(await queue.batch(0))
    # Somebody's experiment read from the stream by hand.
    await redis.client.xreadgroup("trainers", "stranger", {f"{redis.prefix}trajectories": ">"})
    await queue.apply(c.Resume("another", 0, 0))
    assert await pending(redis) == {}
    again = await queue.apply(c.LeaseBatch("another", 2, 0, 2, c.Lane.TRAIN, (), "batch"))
    assert names(again) == held
    assert await pending(redis) == {b"another": 2}


async def test_all_keys_share_the_runs_slot(redis: RedisBackend) -> None:
    queue = Driver(redis)
    await queue.start(tasks=4, max_attempts=1)
    leases = (await queue.lease()).leases
    await queue.complete(leases[0])
    await queue.apply(c.GiveBack("node", leases[1].lease_id, (c.Partial(0, b"half"),)))
    await queue.apply(c.Fail("node", leases[2].lease_id, c.Failure.DATA, "unreadable"))
    await queue.apply(c.Pause(True, "operator"))
    await queue.commit(await queue.batch(0, groups=1), 1)
    for key in await redis.client.keys("*"):
        assert re.match(rb"leeway:\{[^{}]+\}:", key)


async def test_a_finished_run_leaves_only_what_it_must_remember(redis: RedisBackend) -> None:
    """Memory does not grow with the groups that passed, but for their ids."""
    queue = Driver(redis)
    await queue.start(tasks=8, budget=0)
    for version in range(4):
        for lease in (await queue.lease(version=version)).leases:
            await queue.complete(lease, version=version)
        await queue.step(version)
        await queue.apply(c.Checkpointed(queue.incarnation, version + 1))
    left = {
        key.decode().removeprefix(redis.prefix)
        for key in await redis.client.keys(f"{redis.prefix}*")
    }
    assert left == {"meta", "counts", "counters", "known", "trajectories", "last_commit", "nodes"}


async def test_scripts_that_were_flushed_are_loaded_again(redis: RedisBackend) -> None:
    queue = Driver(redis)
    await queue.start(tasks=1)
    await redis.client.script_flush()
    (lease,) = (await queue.lease()).leases
    await redis.client.script_flush()
    await queue.complete(lease)
    await redis.check_payloads()


async def test_calls_that_find_the_scripts_gone_all_at_once_are_answered(
    redis: RedisBackend,
) -> None:
    """As after a restart of the server, under load."""
    queue = Driver(redis)
    await queue.start(tasks=32)
    for _ in range(5):
        await redis.client.script_flush()
        await asyncio.gather(*(queue.lease(1) for _ in range(16)))


async def test_a_killed_redis_comes_back_with_everything_it_acknowledged(tmp_path: Path) -> None:
    before: c.Report | None = None
    with embedded(BINARY, tmp_path) as url:
        async with open_store(url, settings()) as store:
            driver = Driver(store)  # type: ignore[arg-type]
            await driver.start(tasks=4)
            for lease in (await driver.lease()).leases[:3]:
                await driver.complete(lease)
            await driver.commit(await driver.batch(0), 1)
            before = await driver.report()
            server = server_in(tmp_path)
            server.kill()
    with embedded(BINARY, tmp_path) as url:
        async with open_store(url, settings()) as store:
            after = await store.apply(c.Status())
            assert after.groups == before.groups
            assert (after.version, after.incarnation) == (before.version, before.incarnation)
            assert (after.counters, after.payload_bytes) == (before.counters, before.payload_bytes)
            restored = await store.apply(c.Resume("trainer", 0, 0))
            assert restored.restored == 2


async def test_a_store_is_opened_once_a_full_redis_has_room(tmp_path: Path) -> None:
    with embedded(BINARY, tmp_path) as url:
        async with connect(url) as client:
            await client.config_set("maxmemory", "1")
            opening = asyncio.create_task(opened(url))
            await has_refused(client, "OOM")
            assert not opening.done()
            await client.config_set("maxmemory", "0")
            assert (await opening).enqueued == 0


async def has_refused(client: Redis, word: str) -> None:
    """Waits until the server has answered somebody with this error."""

    async def counted() -> bool:
        return f"errorstat_{word}" in await client.info("errorstats")

    await eventually(counted, f"an error {word} of the server")


async def opened(url: str) -> c.Report:
    async with open_store(url, settings()) as store:
        return await store.apply(c.Status())


async def without_replicas(client: Redis, _directory: Path, bad: bool) -> None:
    await client.config_set("min-replicas-to-write", int(bad))


async def failing_over(client: Redis, _directory: Path, bad: bool) -> None:
    await client.replicaof(*(("127.0.0.1", "1") if bad else ("NO", "ONE")))


async def with_a_full_disk(client: Redis, directory: Path, bad: bool) -> None:
    """A snapshot fails, as on a full disk: its name is taken by a folder."""
    taken = directory / "dump.rdb"
    if bad:
        taken.mkdir()
        await client.config_set("save", "3600 1")
    else:
        taken.rmdir()
    await client.bgsave()

    async def ended() -> bool:
        return (await client.info())["rdb_last_bgsave_status"] == ("err" if bad else "ok")

    await eventually(ended, "the snapshot's end")


@pytest.mark.parametrize(
    ("word", "trouble"),
    [
        ("NOREPLICAS", without_replicas),
        ("READONLY", failing_over),
        ("MISCONF", with_a_full_disk),
    ],
)
async def test_a_redis_that_does_not_write_for_now_is_waited_for(
    tmp_path: Path, word: str, trouble: Callable[[Redis, Path, bool], Awaitable[None]]
) -> None:
    with embedded(BINARY, tmp_path / "redis") as url:
        config = configuration(tmp_path, queue=QueueConfig(redis_url=url, lease_seconds=120))
        async with (
            serving(config) as address,
            rpc.connect(address, config.security) as channel,
            connect(url) as client,
        ):
            trainer, node = TrainerQueue(channel, "trainer"), RolloutQueue(channel, "node")
            await trainer.resume(0)
            await trainer.enqueue([task(0)])
            (lease,) = (
                await node.lease_tasks(
                    version=0, max_groups=1, wait_seconds=1, request_id="request"
                )
            ).leases
            await trouble(client, tmp_path / "redis", True)
            before = (await client.info("stats"))["total_connections_received"]
            pushing = asyncio.create_task(node.push(lease.lease_id, group_of(lease.task)))
            await has_refused(client, word)
            await trouble(client, tmp_path / "redis", False)
            assert len((await pushing).accepted) == 2
            after = (await client.info("stats"))["total_connections_received"]
            assert after > before  # To whatever server the address stands for now.


@pytest.mark.slow
async def test_redis_away_for_half_a_minute_costs_nothing_but_time(tmp_path: Path) -> None:
    with embedded(BINARY, tmp_path / "redis") as url:
        server = server_in(tmp_path)
        config = configuration(tmp_path, queue=QueueConfig(redis_url=url, lease_seconds=120))
        async with serving(config) as address, rpc.connect(address, config.security) as channel:
            trainer, node = TrainerQueue(channel, "trainer"), RolloutQueue(channel, "node")
            await trainer.resume(0)
            await trainer.enqueue([task(number) for number in range(2)])
            leased = await node.lease_tasks(
                version=0, max_groups=2, wait_seconds=1, request_id="request"
            )
            server.send_signal(signal.SIGSTOP)
            filling = asyncio.create_task(
                trainer.lease_batch(version=0, groups=2, deadline_seconds=90)
            )
            pushing = [
                asyncio.create_task(node.push(lease.lease_id, group_of(lease.task)))
                for lease in leased.leases
            ]
            await asyncio.sleep(30)
            server.send_signal(signal.SIGCONT)
            for push in pushing:
                assert not (await push).refused
            assert len((await filling).groups) == 2


async def test_a_service_stops_although_redis_hangs(tmp_path: Path) -> None:
    """redis-py may take a cancellation in the middle of a call for a timeout."""
    with embedded(BINARY, tmp_path / "redis") as url:
        config = configuration(tmp_path, queue=QueueConfig(redis_url=url))
        server = server_in(tmp_path)
        try:
            async with asyncio.timeout(30):
                async with serving(config) as address, rpc.connect(address, config.security) as ch:
                    await TrainerQueue(ch, "trainer").resume(0)
                    server.send_signal(signal.SIGSTOP)
                    await asyncio.sleep(1.5)  # The service is in the middle of a call.
        finally:
            server.send_signal(signal.SIGCONT)
