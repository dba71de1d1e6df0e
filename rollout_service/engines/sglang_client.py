"""The HTTP of an SGLang server: every call with its deadline, every refusal a typed error.

Shapes are those of SGLang 0.5.23. Nothing here knows of versions, weights or policies.
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
_ANSWER_SECONDS = 1800.0
_POLL_SECONDS = 0.2


class SglangClient:
    """Calls one server. Errors: `EngineError` for what it refuses, `InfrastructureError` when it is
    away or late."""

    def __init__(self, url: str) -> None:
        self.url = url
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(base_url=url, limits=limits, timeout=_CONTROL_SECONDS)

    async def close(self) -> None:
        await self._http.aclose()

    async def ready(self, seconds: float) -> None:
        """Waits for a server that starts: it loads a model and may compile."""
        try:
            async with asyncio.timeout(seconds):
                while not await self._answers():
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError as error:
            raise DeadlineError(f"{self.url}: no SGLang server was ready for {seconds:g} s") from (
                error
            )

    async def _answers(self) -> bool:
        try:
            return (await self._http.get("/ready", timeout=5.0)).status_code == 200
        except httpx.TransportError:
            return False

    async def model_info(self) -> dict[str, Any]:
        return dict(await self._json("GET", "/model_info"))

    async def server_info(self) -> dict[str, Any]:
        return dict(await self._json("GET", "/server_info"))

    async def loads(self) -> list[dict[str, Any]]:
        """Of each data-parallel rank: `token_usage`, `num_waiting_reqs` and more."""
        return list((await self._json("GET", "/v1/loads"))["loads"])

    async def generate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One answer, whole."""
        return dict(await self._json("POST", "/generate", request, seconds=_ANSWER_SECONDS))

    async def stream(self, request: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """One answer as it grows: each item holds all of it so far."""
        body = {**request, "stream": True}
        try:
            async with self._http.stream(
                "POST", "/generate", json=body, timeout=_ANSWER_SECONDS
            ) as response:
                if response.status_code != 200:
                    raise self._refusal(response, (await response.aread()).decode())
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        yield json.loads(line.removeprefix("data: "))
        except httpx.TransportError as error:
            raise InfrastructureError(f"{self.url}/generate: {error!r}") from error

    async def control(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Pause, continue, abort, and the steps of an update."""
        return await self._json("POST", path, body or {})

    async def _json(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        seconds: float = _CONTROL_SECONDS,
    ) -> Any:
        try:
            response = await self._http.request(method, path, json=body, timeout=seconds)
        except httpx.TimeoutException as error:
            raise DeadlineError(f"{self.url}{path}: no answer within {seconds:g} s") from error
        except httpx.TransportError as error:
            raise InfrastructureError(f"{self.url}{path}: {error!r}") from error
        if response.status_code != 200:
            raise self._refusal(response, response.text)
        return response.json() if response.content.strip() else None

    def _refusal(self, response: httpx.Response, text: str) -> EngineError | InfrastructureError:
        message = f"{self.url}{response.url.path}: {response.status_code}: {text[:300]}"
        return InfrastructureError(message) if response.status_code >= 500 else EngineError(message)
