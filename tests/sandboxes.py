"""The workers of a node, wherever they are: its own, or those of a sandbox that serves for real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from leeway.config import Config, EndpointConfig
from rollout_service.rewards.judges import Judges
from rollout_service.sandbox.pool import WorkerPool
from rollout_service.sandbox.remote import sandboxes
from rollout_service.sandbox.service import serve
from rollout_service.sandbox.work import Work, Workers
from tests.waiting import alive, eventually

PLACES = ("node", "sandbox")


def configuration(
    judges: Mapping[str, EndpointConfig] | None = None, address: str = "127.0.0.1:0", **task: Any
) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "unused"},
            "task": {"jsonl": "unused.jsonl", "judges": judges or {}, **task},
            "rollout": {"sandbox": {"address": address, "drain_seconds": 1}},
        }
    )


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[str]:
    """The address of a sandbox in this process."""
    stop = asyncio.Event()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(config, stop=stop, on_ready=address.set_result))
        try:
            async with asyncio.timeout(60):
                at = await address
            yield at
        finally:
            stop.set()


@asynccontextmanager
async def workers(
    place: str, judges: Mapping[str, EndpointConfig] | None = None, **task: Any
) -> AsyncIterator[Workers]:
    """Of a task, in one of `PLACES`."""
    config = configuration(judges, **task)
    async with AsyncExitStack() as stack:
        asked = await stack.enter_async_context(Judges(config.task.judges))
        work = Work.of(config.task)
        if place == "node":
            yield await stack.enter_async_context(WorkerPool(work, asked))
            return
        address = await stack.enter_async_context(serving(config))
        yield await stack.enter_async_context(sandboxes(config, address, work, asked))


async def under_way(file: Path) -> int:
    """The process of a call that has begun, and wrote its id there."""
    await eventually(lambda: file.exists() and file.read_text() != "", "a call's begin")
    return int(file.read_text())


async def ended(pid: int) -> None:
    await eventually(lambda: not alive(pid), f"the end of process {pid}")
