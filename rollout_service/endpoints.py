"""Models that others serve: OpenAI-compatible endpoints, asked within a limit and a deadline.

Who calls: `rewards.judges` for reward functions, `evaluation` for held-out problems. What must
hold: at most `concurrency` requests are under way; only what trying again could cure is tried
again; a question ends by its deadline, its turns and pauses included; the key goes to the server
alone, and stands in no message.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, Self

import httpx2 as httpx
import structlog
from prometheus_client import Counter, Histogram
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    wait_random_exponential,
)

from leeway.config import EndpointConfig
from leeway.errors import ConfigError, DeadlineError, EngineError, InfrastructureError

log = structlog.get_logger(__name__)

ASKED = Counter(
    "leeway_endpoint_requests_total",
    "Requests to judges and other endpoints, by how they ended",
    ["endpoint", "outcome"],
)
SECONDS = Histogram(
    "leeway_endpoint_seconds",
    "From a question to its answer, turns and retries included",
    ["endpoint"],
)

# The longest answer that is read.
_ANSWER_BYTES = 4 << 20
_TOLD_CHARACTERS = 300
_BACKOFF = wait_random_exponential(multiplier=0.1, max=5.0)
_BUSY = frozenset({408, 409, 425, 429})
_NOT_LET_IN = frozenset({401, 403, 404})


class _AwayError(InfrastructureError):
    """The server is away or busy."""

    def __init__(self, message: str, pause: float = 0.0) -> None:
        super().__init__(message)
        self.pause = pause


class Endpoint:
    """One server; an asynchronous context manager.

    Args:
        name: Of the endpoint in the configuration, for messages and metrics.
    """

    def __init__(self, name: str, config: EndpointConfig) -> None:
        self.name = name
        self.seconds = config.seconds
        self._url = config.url.rstrip("/")
        self._model = config.model
        self._key = config.key()
        self._turns = asyncio.Semaphore(config.concurrency)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=None,
            limits=httpx.Limits(max_connections=config.concurrency + 1),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def check(self) -> None:
        """Asks for the models that it serves.

        Raises:
            ConfigError: it does not let this key in.
            DeadlineError: it stayed away.
        """
        try:
            listed = await self._within_deadline("GET", "/models", None)
        except EngineError as error:  # Some servers have no such route.
            log.info("endpoint lists no models", endpoint=self.name, reason=str(error))
            return
        except _NotLetInError as error:
            if error.status == 404:
                return
            raise ConfigError(str(error)) from error
        names = [str(model.get("id")) for model in listed.get("data", ())]
        if self._model not in names:
            log.warning(
                "endpoint does not list its model",
                endpoint=self.name,
                model=self._model,
                listed=names[:20],
            )

    async def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Posts to a path below the URL; `model` is filled in.

        Raises:
            EngineError: it refused the question; asking again would not help.
            InfrastructureError: it is away, busy or broken until the deadline, or does not let this
                key in.
        """
        started = time.monotonic()
        outcome = "failed"
        try:
            answer = await self._within_deadline("POST", path, {"model": self._model, **body})
            outcome = "ok"
            return answer
        except EngineError:
            outcome = "refused"
            raise
        except DeadlineError:
            outcome = "deadline"
            raise
        finally:
            ASKED.labels(self.name, outcome).inc()
            SECONDS.labels(self.name).observe(time.monotonic() - started)

    async def _within_deadline(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        last = ""

        async def attempt() -> dict[str, Any]:
            nonlocal last
            try:
                async with self._turns:
                    last = last or "no answer came"
                    return await self._send(method, path, body)
            except _AwayError as error:
                last = str(error)
                raise

        try:
            async with asyncio.timeout(self.seconds):
                again = AsyncRetrying(retry=retry_if_exception_type(_AwayError), wait=_pause)
                return await again(attempt)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self.name}: {self._url}{path} was not done after {self.seconds:g} s; last: "
                f"{last or 'it was not its turn'}"
            ) from error

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        where = f"{self.name}: {self._url}{path}"
        try:
            async with self._http.stream(method, self._url + path, json=body) as answer:
                read = bytearray()
                async for part in answer.aiter_bytes():
                    read += part
                    if len(read) > _ANSWER_BYTES:
                        raise EngineError(f"{where}: answered more than {_ANSWER_BYTES} bytes")
        except httpx.TransportError as error:
            raise _AwayError(f"{where}: {error!r}") from error
        status = answer.status_code
        told = self._redacted(bytes(read).decode(errors="replace"))[:_TOLD_CHARACTERS]
        if status in _BUSY or status >= 500:
            raise _AwayError(f"{where}: status {status}: {told}", _retry_after(answer))
        if status in _NOT_LET_IN or 300 <= status < 400:
            raise _NotLetInError(
                f"{where}: status {status}: {told}; see that its url, api_key and model are right",
                status,
            )
        if status != 200:
            raise EngineError(f"{where}: refuses the question with status {status}: {told}")
        try:
            tree = json.loads(read)
        except ValueError as error:
            raise _AwayError(f"{where}: no JSON: {told}") from error
        if not isinstance(tree, dict):
            raise EngineError(f"{where}: answered no JSON object: {told}")
        return tree

    def _redacted(self, text: str) -> str:
        """Servers repeat keys that they do not know."""
        return text.replace(self._key, "(secret)") if self._key else text


class _NotLetInError(InfrastructureError):
    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _pause(state: RetryCallState) -> float:
    assert state.outcome is not None  # tenacity pauses after an attempt
    error = state.outcome.exception()
    return max(_BACKOFF(state), error.pause if isinstance(error, _AwayError) else 0.0)


def _retry_after(answer: httpx.Response) -> float:
    try:
        return max(0.0, float(answer.headers.get("retry-after", "0")))
    except ValueError:  # A date: the usual pause will do.
        return 0.0
