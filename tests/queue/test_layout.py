"""What a run looks like in Redis: a service of another release must not take it for its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from leeway.errors import ConfigError
from tests.queue.cases import Driver, RedisBackend, settings
from trajectory_queue import commands as c

GOLDEN = Path(__file__).parent.parent / "golden"


def parsed(key: str, value: bytes) -> Any:
    if key.endswith((".record", "batches.train:trainer")):
        return msgpack.unpackb(value)
    return json.loads(value) if key.startswith("node") else value


def places(name: str, value: Any) -> Iterator[str]:
    """Where something is said, without what is said."""
    parts: dict[Any, Any] = {}
    if isinstance(value, dict):
        parts = value
    elif isinstance(value, list):
        parts = dict(enumerate(value))
    if not parts:
        yield name
    for part, each in parts.items():
        yield from places(f"{name}.{part}", each)


async def layout(redis: RedisBackend) -> set[str]:
    found: set[str] = set()
    for key in await redis.client.keys(f"{redis.prefix}*"):
        name = re.sub(r"[0-9a-f]{32}|\bt\d", "*", key.decode().removeprefix(redis.prefix))
        kind = (await redis.client.type(key)).decode()
        found.add(f"{name}: {kind}")
        if kind == "hash" and name != "counters":
            for field, value in (await redis.client.hgetall(key)).items():
                place = f"{name}.{field.decode()}"
                found |= set(places(place, parsed(place, value)))
    return found


async def test_what_redis_holds_changes_with_its_number_only(
    redis: RedisBackend, tmp_path: Path
) -> None:
    """With all that commands leave there, in a history that is always the same."""
    queue = Driver(redis)
    await queue.start(tasks=5, max_attempts=1)
    leases = (await queue.lease(4)).leases
    await queue.complete(leases[0])
    await queue.apply(c.GiveBack("node", leases[1].lease_id, (c.Partial(0, b"half"),)))
    await queue.apply(c.Fail("node", leases[2].lease_id, c.Failure.DATA, "unreadable"))
    await queue.apply(c.Extend("node", 0, (), waiting_for="budget", waiting_ms=5))
    await queue.apply(c.Pause(True, "operator"))
    await queue.batch(0)
    found = await layout(redis)
    await queue.commit(await queue.batch(0, groups=1), 1)
    found |= await layout(redis)

    number = int(await redis.client.hget(f"{redis.prefix}meta", "layout") or 0)
    golden = GOLDEN / f"queue_layout_{number}.txt"
    written = tmp_path / golden.name
    written.write_text("\n".join(sorted(found)) + "\n")
    assert golden.exists() and written.read_text() == golden.read_text(), (
        f"raise LAYOUT in lua/common.lua, and take {written} as the golden file of the new number"
    )


@pytest.mark.parametrize("other", ["0", "2"])
async def test_a_run_that_another_release_laid_out_is_refused_untouched(
    redis: RedisBackend, other: str
) -> None:
    await Driver(redis).start(tasks=1)
    await redis.client.hset(f"{redis.prefix}meta", "layout", other)
    before = await redis.client.hgetall(f"{redis.prefix}meta")
    with pytest.raises(ConfigError, match=rf"run\.name = run: .* layout {other}, .* layout 1; let"):
        await redis.apply(c.Configure(settings(budget=7)))
    assert await redis.client.hgetall(f"{redis.prefix}meta") == before
