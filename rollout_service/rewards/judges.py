"""A node's judges: what its reward functions and environments ask, over all their processes.

The functions have neither the keys nor a connection. They ask through the pipe of their process
(`sandbox.judge`), and the node asks the server: so the limit holds for the node, and a judge that
fails is known as such, whatever the function makes of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Self

from leeway.config import EndpointConfig
from leeway.errors import EngineError, InfrastructureError
from rollout_service.endpoints import Endpoint


class Judges:
    """An asynchronous context manager; entering asks each server whether it is there."""

    def __init__(self, configs: Mapping[str, EndpointConfig]) -> None:
        self._endpoints = {
            name: Endpoint(f"task.judges.{name}", config) for name, config in configs.items()
        }
        self._stack = AsyncExitStack()

    @property
    def names(self) -> list[str]:
        return list(self._endpoints)

    @property
    def seconds(self) -> float:
        """The longest that one question may take."""
        return max((endpoint.seconds for endpoint in self._endpoints.values()), default=0.0)

    async def __aenter__(self) -> Self:
        """Raises:
        ConfigError: a judge does not let its key in.
        DeadlineError: a judge is away.
        """
        async with AsyncExitStack() as opening:
            for endpoint in self._endpoints.values():
                await opening.enter_async_context(endpoint)
            await asyncio.gather(*(endpoint.check() for endpoint in self._endpoints.values()))
            self._stack = opening.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Asks all requests of {"judge", "requests": [{"path", "body"}]} at once.

        Returns:
            {"answers": [{"ok": JSON} or {"refused": why}]}, in order.

        Raises:
            InfrastructureError: the judge failed at one of them; the others are cancelled.
        """
        endpoint = self._endpoints[question["judge"]]

        async def one(request: Mapping[str, Any]) -> dict[str, Any]:
            try:
                return {"ok": await endpoint.ask(request["path"], request["body"])}
            except EngineError as error:
                return {"refused": str(error)}

        try:
            async with asyncio.TaskGroup() as asking:
                asked = [asking.create_task(one(request)) for request in question["requests"]]
        except* InfrastructureError as failures:
            failure = failures.exceptions[0]
            assert isinstance(failure, InfrastructureError)  # tasks raise no groups
            raise failure from None
        return {"answers": [task.result() for task in asked]}
