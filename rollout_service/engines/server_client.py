"""The HTTP of a server beside the node: every call with its deadline, every refusal a typed error.

Nothing here knows of versions, weights or policies, nor which server it is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx2 as httpx

from leeway.errors import DeadlineError, EngineError, InfrastructureError

# Control calls wait for a step of the scheduler, and an update for its copy.
_CONTROL_SECONDS = 120.0
# The longest answer: beyond, the server is taken as hung.
ANSWER_SECONDS = 1800.0
_POLL_SECONDS = 0.2


class ServerClient:
    """Calls one server. Errors: `EngineError` for what it refuses, `InfrastructureError` when it is
    away or late."""

    def __init__(self, url: str) -> None:
        self.url = url
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(base_url=url, limits=limits, timeout=_CONTROL_SECONDS)

    async def close(self) -> None:
        await self._http.aclose()

    async def ready(self, path: str, seconds: float) -> None:
        """Waits for a server that starts, until the path answers 200: it loads a model and may
        compile.

        Raises:
            DeadlineError: it was not ready in time.
        """
        try:
            async with asyncio.timeout(seconds):
                while not await self._answers(path):
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError as error:
            raise DeadlineError(f"{self.url}: no server was ready for {seconds:g} s") from error

    async def _answers(self, path: str) -> bool:
        try:
            return (await self._http.get(path, timeout=5.0)).status_code == 200
        except httpx.TransportError:
            return False

    async def get(self, path: str) -> str:
        return (await self._send("GET", path, None, _CONTROL_SECONDS)).text

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        seconds: float = _CONTROL_SECONDS,
    ) -> Any:
        """What it answers; None when that is empty."""
        response = await self._send("POST", path, body or {}, seconds)
        return response.json() if response.content.strip() else None

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of one answer, as they come."""
        ended = False
        try:
            async with self._http.stream(
                "POST", path, json={**body, "stream": True}, timeout=ANSWER_SECONDS
            ) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode()
                    raise self.refusal(path, response.status_code, text)
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            # What it would have answered with, were it not a stream.
                            raise self.refusal(path, int(event["error"].get("code", 500)), line)
                        yield event
                    ended = ended or line == "data: [DONE]"
        except httpx.TransportError as error:
            raise InfrastructureError(f"{self.url}{path}: {error!r}") from error
        if not ended:
            raise InfrastructureError(f"{self.url}{path}: the stream broke off")

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float
    ) -> httpx.Response:
        try:
            response = await self._http.request(method, path, json=body, timeout=seconds)
        except httpx.TimeoutException as error:
            raise DeadlineError(f"{self.url}{path}: no answer within {seconds:g} s") from error
        except httpx.TransportError as error:
            raise InfrastructureError(f"{self.url}{path}: {error!r}") from error
        if response.status_code != 200:
            raise self.refusal(path, response.status_code, response.text)
        return response

    def refusal(self, path: str, status: int, text: str) -> EngineError | InfrastructureError:
        message = f"{self.url}{path}: {status}: {text[:300]}"
        return InfrastructureError(message) if status >= 500 else EngineError(message)
