"""Servers that the queue's tests share, and the backends of the contract."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.queue.cases import Driver, RedisBackend, backend, backends, servers
from trajectory_queue.embedded import embedded


@pytest.fixture(scope="session")
def redis_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """One embedded server of each kind."""
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(embedded(binary, _directory(tmp_path_factory, name)))
            for name, binary in servers().items()
        }


@pytest.fixture(params=list(backends()))
async def queue(
    request: pytest.FixtureRequest, redis_urls: dict[str, str]
) -> AsyncIterator[Driver]:
    """The same contract for the pure ledger and for every server."""
    async with backend(request.param, redis_urls) as system:
        yield Driver(system)


@pytest.fixture(params=list(servers()))
async def redis(
    request: pytest.FixtureRequest, redis_urls: dict[str, str]
) -> AsyncIterator[RedisBackend]:
    """What is Redis' own, on every server."""
    backend = RedisBackend(redis_urls[request.param])
    yield backend
    await backend.client.aclose()


def _directory(factory: pytest.TempPathFactory, name: str) -> Path:
    return factory.mktemp(name)
