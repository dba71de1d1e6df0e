"""The ledger in Redis (or Valkey): commands as atomic Lua scripts, and what the server must offer.

All keys of a run share the hash tag `{run}`, so that Redis Cluster keeps them together and
spreads runs. Scripts go by EVALSHA. Several services may share one store: whatever one of them
changes wakes the waiters of all, the own at once and the others' within `_POLL_SECONDS`.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any, TypeVar

import redis.asyncio as redis
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from leeway.errors import ConfigError, DataError, FencedError, InfrastructureError
from trajectory_queue import codec
from trajectory_queue import commands as c
from trajectory_queue.commands import Command
from trajectory_queue.signals import Signals, pause

log = structlog.get_logger(__name__)

R = TypeVar("R")

_ROLLOUT = (c.Enqueue, c.Open, c.LeaseTasks, c.Extend, c.Push, c.GiveBack, c.Fail, c.Expire)
_TRAINER = (c.LeaseBatch, c.Fetch, c.Commit, c.Release, c.Checkpointed, c.Resume)
_SCRIPT_OF: dict[type[Command[Any]], str] = {
    **dict.fromkeys(_ROLLOUT, "rollout"),
    **dict.fromkeys(_TRAINER, "trainer"),
}

# Since 7.0 XAUTOCLAIM skips deleted entries by itself.
_OLDEST_SERVER = (7, 0)
_CALL_SECONDS = 5.0
# Replies carry megabytes; in small reads asyncio moves its buffer again and again.
_READ_BYTES = 1 << 20
# How soon a waiter learns what another service changed.
_POLL_SECONDS = 0.1
# With these a server says that it does not write for now: it fails over, or its disk is full. A few
# of them redis-py knows as classes; a script puts its own place before the word.
_NOT_NOW = (ReadOnlyError, MasterDownError, ClusterDownError, TryAgainError)
_NOT_NOW_WORDS = re.compile(
    r"\b(READONLY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS|MISCONF|LOADING|BUSY)\b"
)
_ERRORS = {"fenced": FencedError, "invalid": DataError, "config": ConfigError}
# A group may be gone between its script and the reading of its payloads; the script then says so.
_READ_ATTEMPTS = 3


class StoreFullError(InfrastructureError):
    """The server's memory is used up; it takes reads and deletions only."""


class RedisStore:
    """A `commands.Store` on a Redis or Valkey server; see `open_store`."""

    def __init__(
        self, client: redis.Redis, run_id: str, clock: Callable[[], int] | None = None
    ) -> None:
        self._client = client
        self._prefix = f"leeway:{{{run_id}}}:"
        self._clock = clock
        self._scripts = {name: _Script(name) for name in ("rollout", "trainer", "operator")}
        self.signals = Signals()

    async def apply(self, command: Command[R]) -> R:
        arguments, blobs = codec.encode(command)
        now = str(self._clock()) if self._clock is not None else ""
        words: list[str | bytes] = [type(command).__name__, now, arguments]
        payloads: dict[str, bytes] = {}
        if isinstance(command, c.Push):
            push = uuid.uuid4().hex
            words += [push, *(str(len(blob)) for blob in blobs)]
            payloads = {f"{self._prefix}payload:{push}:{n}": b for n, b in enumerate(blobs)}
        else:
            words += blobs
        script = self._scripts[_SCRIPT_OF.get(type(command), "operator")]
        for _ in range(_READ_ATTEMPTS):
            async with self._translated():
                reply = await self._evaluate(script, words, payloads)
                tree = codec.unpack(reply[0])
                read = await self._client.mget(tree["read"]) if tree.get("read") else []
            if "error" in tree:
                raise _ERRORS[tree["error"]](tree["message"])
            for channel in tree["wake"]:
                self.signals.set(channel)
            if None not in read:
                return codec.decode(command, tree["ok"], reply[1:] + read)
        raise InfrastructureError("what was to be read left the queue again and again")

    async def _evaluate(
        self, script: _Script, words: list[str | bytes], payloads: dict[str, bytes]
    ) -> Any:
        """The script's reply; `payloads`, by key, are set in the same transaction."""
        call: list[Any] = [script.sha, 1, self._prefix, *words]
        for _ in range(2):
            try:
                if not payloads:
                    return await self._client.evalsha(*call)
                async with self._client.pipeline(transaction=True) as transaction:
                    transaction.mset(payloads)
                    transaction.evalsha(*call)
                    return (await transaction.execute())[1]
            except NoScriptError:
                # The server is new, restarted, or somebody flushed its scripts.
                await self._client.script_load(script.source)
        raise InfrastructureError("redis forgets scripts as soon as they are loaded")

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        """What the enclosed calls to the server raise, as the queue's own errors."""
        try:
            yield
        except OutOfMemoryError as error:
            raise StoreFullError(
                f"redis is out of memory: {error}; raise its maxmemory or lower queue.max_bytes"
            ) from error
        except ResponseError as error:
            if "OOM" in str(error):
                raise StoreFullError(f"redis is out of memory: {error}") from error
            if isinstance(error, _NOT_NOW) or _NOT_NOW_WORDS.search(str(error)):
                # After a failover its address stands for another server.
                await self._client.connection_pool.disconnect(inuse_connections=False)
                raise InfrastructureError(f"redis does not write for now: {error}") from error
            raise
        except (RedisError, OSError, TimeoutError) as error:
            raise InfrastructureError(f"redis is away: {error}") from error

    async def watch(self, stop: asyncio.Event) -> None:
        """Wakes this service's waiters when another service changed something, until `stop`."""
        seen: list[Any] = [None, None]
        while not stop.is_set():
            await pause(_POLL_SECONDS, stop)
            if not self.signals.anyone_waits:
                continue
            try:
                epochs = await self._client.hmget(
                    f"{self._prefix}meta", ["tasks_epoch", "groups_epoch"]
                )
            except (RedisError, OSError, TimeoutError):
                continue  # Whoever applies a command says so.
            for name, before, after in zip(("tasks", "groups"), seen, epochs, strict=True):
                if after != before:
                    self.signals.set(name)
            seen = epochs

    async def verify(self) -> None:
        """Raises `ConfigError` when the server could lose or evict what it is given."""
        try:
            facts = await self._client.info()
            policy = (await self._client.config_get("maxmemory-policy"))["maxmemory-policy"]
            append_only = (await self._client.config_get("appendonly"))["appendonly"]
        except ResponseError as error:
            # Managed servers forbid CONFIG; INFO says the same.
            policy = facts.get("maxmemory_policy", "unknown")
            append_only = "yes" if facts.get("aof_enabled") else "no"
            log.info("redis does not show its configuration", reason=str(error))
        version = facts.get("valkey_version") or facts["redis_version"]
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_SERVER:
            raise ConfigError(f"redis {version} is too old: use 7.0 or newer, or Valkey")
        if policy != "noeviction":
            raise ConfigError(
                f"redis maxmemory-policy = {policy}: it would throw trajectories away when full; "
                "set `maxmemory-policy noeviction`"
            )
        if append_only != "yes":
            raise ConfigError(
                "redis appendonly = no: a restart would lose the queue; set `appendonly yes`"
            )


def connect(url: str) -> redis.Redis:
    """A client; it connects when first used, and again when it must."""
    return redis.Redis.from_url(
        url,
        socket_timeout=_CALL_SECONDS,
        socket_connect_timeout=_CALL_SECONDS,
        socket_read_size=_READ_BYTES,
        health_check_interval=30,
        # Retries belong to the caller, who knows its deadline.
        retry=Retry(NoBackoff(), 0),
    )


@asynccontextmanager
async def open_store(
    url: str,
    settings: c.Settings,
    *,
    clock: Callable[[], int] | None = None,
    patience: float = 30.0,
) -> AsyncIterator[RedisStore]:
    """A verified, configured store on the server at `url`.

    Raises:
        ConfigError: the server evicts, does not persist, or is too old; or it holds the run as
            another release lays it out.
        InfrastructureError: it did not answer, or was full, for `patience` seconds.
    """
    client = connect(url)
    store = RedisStore(client, settings.run_id, clock)
    try:
        await _configured(store, settings, patience)
        stop = asyncio.Event()
        watching = asyncio.create_task(store.watch(stop))
        try:
            yield store
        finally:
            stop.set()
            await watching
    finally:
        await client.aclose()


async def _configured(store: RedisStore, settings: c.Settings, patience: float) -> None:
    """Waits for a server that still loads its append-only file, or has no room."""
    loop = asyncio.get_running_loop()
    end = loop.time() + patience
    while True:
        try:
            await store.verify()
            await store.apply(c.Configure(settings))
            return
        except (RedisError, OSError, TimeoutError, InfrastructureError) as error:
            if loop.time() >= end:
                raise InfrastructureError(
                    f"redis was not ready within {patience:g} s: {error}"
                ) from error
            await asyncio.sleep(0.1)


class _Script:
    """The commands of one file of lua/, with what they share, and the digest to call them by."""

    def __init__(self, name: str) -> None:
        folder = resources.files("trajectory_queue") / "lua"
        text = (folder / "common.lua").read_text() + (folder / f"{name}.lua").read_text()
        # Comments cost parsing on every load, and nobody reads them there.
        self.source = re.sub(r"(?m)^\s*--.*\n", "", text)
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
