"""Builds the queue service out of a configuration: what `leeway queue serve` runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from leeway import rpc
from leeway.config import Config
from leeway.v1 import queue_pb2, queue_pb2_grpc
from trajectory_queue import page
from trajectory_queue.commands import Settings
from trajectory_queue.embedded import redis_server
from trajectory_queue.history import History
from trajectory_queue.metrics import watch_loop
from trajectory_queue.service import QueueService
from trajectory_queue.store import open_store
from trajectory_queue.terms import Terms

log = structlog.get_logger(__name__)

_NAME = queue_pb2.DESCRIPTOR.services_by_name["TrajectoryQueue"].full_name


async def serve(
    config: Config,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[str], None] = lambda address: None,
    clock: Callable[[], int] | None = None,
) -> None:
    """Serves the run's queue until `stop` is set.

    Args:
        on_ready: Called with the address once the service answers.
        clock: Milliseconds, for tests; by default Redis' own clock, one for all services.

    Raises:
        ConfigError: an address cannot be bound, or Redis could lose or evict data.
        InfrastructureError: Redis did not answer.
    """
    settings = Settings.from_config(config)
    with redis_server(config, config.run.path / "redis") as url:
        async with open_store(url, settings, clock=clock) as store:
            history = History()
            service = QueueService(store, settings, Terms.of(config), history)

            async def setup(server: rpc.Server) -> None:
                await server.add(
                    queue_pb2_grpc.add_TrajectoryQueueServicer_to_server, service, _NAME
                )
                # `open_store` has verified it.
                await server.set_serving(rpc.REDIS, True)

            async with rpc.serve(
                config.queue.address,
                config.security,
                setup,
                max_message_bytes=config.queue.max_message_bytes,
            ) as server:
                log.info("queue is serving", address=server.address)
                on_ready(server.address)
                with _page(config, history):
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(service.tend(stop))
                        watching = tasks.create_task(watch_loop())
                        await stop.wait()
                        watching.cancel()


@contextmanager
def _page(config: Config, history: History) -> Iterator[None]:
    """Serves the web page, if there is to be one."""
    if config.queue.page_address is None:
        yield
        return
    with page.serving(config.queue.page_address, config.security, config.run.name, history) as url:
        log.info("the page is serving", url=url)
        yield
