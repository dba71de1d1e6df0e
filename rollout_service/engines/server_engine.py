"""The `Engine` that is a server beside the node, owned or adopted: SGLang or vLLM.

What must hold, whichever it is:
- Ids in, ids out: text never reaches the server. Ids outside the vocabulary are refused here, since
  some servers end on one.
- The server stamps versions, by the name that each update gives its weights.
- New weights are handed over whole: no server takes changed elements, so that a copy of all weights
  is kept here and patched.
- An update is: close the door, pause, replace, continue, prove by the canary, open the door.
  Nothing begins meanwhile, and nothing sampled since the pause is yielded before the proof.
- Prefix caches are salted by version: a cache of the old policy is never reused, also where running
  requests go on with theirs (`in_place`).

What differs is the `Server` (server.py): it builds requests and reads answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

from leeway.config import UpdateMode
from leeway.errors import EngineError, InfrastructureError, LeewayError
from leeway.manifests import Canary
from leeway.trajectory import FinishReason, Sampling
from leeway.versions import VersionSpan, spans_of
from rollout_service.engines.base import (
    ChangedElements,
    EngineLoad,
    EngineStats,
    GenerateRequest,
    Generation,
    Update,
    check_request,
    joined,
    prove,
)
from rollout_service.engines.constraint import Constraint, ConstraintKind
from rollout_service.engines.server import Answer, Ask, Server, Tell
from rollout_service.engines.stored_weights import load_weights


class ServerEngine:
    """See the module's docstring, and rollout_service.engines.base for the contract."""

    def __init__(
        self, server: Server[Any], directory: Path, context: int, vocabulary: int, version: int
    ) -> None:
        self._server = server
        self._context = context
        self._vocabulary = vocabulary
        self._version = version
        self._takes_constraints = False
        self._weights = load_weights(directory)
        self._names = {str(version): version}
        self._running: set[str] = set()
        self._asked: set[str] = set()
        self._partial: dict[str, int] = {}
        self._broken: LeewayError | None = None
        # Closed while an update is under way: nothing begins.
        self._door = asyncio.Event()
        self._door.set()
        # Closed from the pause to the proof: nothing is told or yielded.
        self._proof = asyncio.Event()
        self._proof.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy_since = 0.0
        self._generated = self._prefilled = self._pauses = 0
        self._busy_seconds = self._pause_seconds = 0.0

    @classmethod
    async def connect(
        cls,
        server: Server[Any],
        directory: Path,
        *,
        start_seconds: float,
        context: int | None = None,
    ) -> ServerEngine:
        """Waits for the server, and checks that it can do what the contract asks.

        Args:
            directory: The model that the server serves, with the weights that it has now.

        Raises:
            DeadlineError: no server was ready in time.
            EngineError: it serves another model, or without ids and log-probabilities.
        """
        await server.ready(start_seconds)
        model = AutoConfig.from_pretrained(directory).get_text_config()
        longest = int(model.max_position_embeddings)
        engine = cls(server, directory, min(context or longest, longest), model.vocab_size, 0)
        for name in await server.probe():
            engine._names.setdefault(name, engine._version)
        engine._takes_constraints = await _follows_constraints(server)
        return engine

    @property
    def version(self) -> int:
        return self._version

    @property
    def context_length(self) -> int:
        return self._context

    @property
    def vocabulary_size(self) -> int:
        return self._vocabulary

    @property
    def takes_constraints(self) -> bool:
        return self._takes_constraints

    def check(self, request: GenerateRequest) -> None:
        check_request(self, request)
        self._server.check(request.sampling)

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Generation]:
        for request in requests:
            self.check(request)
        ids = [request.request_id for request in requests]
        if len(set(ids)) < len(ids) or self._running.intersection(ids):
            raise EngineError(f"request_id: each must be unique, got {ids}")
        if self._broken is not None:
            raise self._broken
        self._running.update(ids)
        tasks = [asyncio.create_task(self._generate(request)) for request in requests]
        return self._read(tasks)

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._running:
                await self._server.abort(request_id)

    def progress(self, request_ids: Collection[str]) -> int:
        """Known of requests with `on_tokens`; others count once they end."""
        return sum(self._partial.get(request_id, 0) for request_id in request_ids)

    async def swap(
        self,
        updates: Mapping[str, Update],
        version: int,
        mode: UpdateMode,
        canary: Canary | None = None,
    ) -> float:
        await asyncio.to_thread(self._patch, updates)
        staged = await asyncio.to_thread(self._server.stage, self._weights, updates.keys())
        self._door.clear()
        try:
            if mode is UpdateMode.DRAIN:
                await self._idle.wait()
            self._proof.clear()
            started = time.monotonic()
            self._names[str(version)] = version
            await self._server.replace(staged, str(version), mode)
            self._version = version
            seconds = time.monotonic() - started
            if canary is not None:
                logprobs = await self._server.logprobs(canary.token_ids, f"canary-{version}")
                prove(canary, version, logprobs)
        except LeewayError as error:
            self._broken = error
            raise
        finally:
            self._proof.set()
            self._door.set()
        self._pauses += 1
        self._pause_seconds += seconds
        return seconds

    def stats(self) -> EngineStats:
        busy = time.monotonic() - self._busy_since if self._asked else 0.0
        return EngineStats(
            running=len(self._asked),
            waiting=len(self._running) - len(self._asked),
            tokens_generated=self._generated,
            tokens_prefilled=self._prefilled,
            busy_seconds=self._busy_seconds + busy,
            pauses=self._pauses,
            pause_seconds=self._pause_seconds,
        )

    async def load(self) -> EngineLoad:
        load = await self._server.load()
        return load if self._door.is_set() else replace(load, waiting=0)

    async def close(self) -> None:
        self._broken = self._broken or InfrastructureError("the engine was closed")
        await self._server.client.close()

    async def _pass(self, gate: asyncio.Event) -> None:
        """Raises what an update broke on."""
        while not gate.is_set():
            await gate.wait()
        if self._broken is not None:
            raise self._broken

    async def _read(self, tasks: Sequence[asyncio.Task[Generation]]) -> AsyncIterator[Generation]:
        try:
            for ended in asyncio.as_completed(tasks):
                generation = await ended
                await self._pass(self._proof)
                yield generation
        finally:
            left = [task for task in tasks if not task.done()]
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)

    async def _generate(self, request: GenerateRequest) -> Generation:
        started = time.monotonic()
        try:
            await self._pass(self._door)
            self._begin(request.request_id)
            return await self._ask(request, started)
        except asyncio.CancelledError:
            if request.request_id in self._asked:
                await self._server.abort(request.request_id)
            raise
        finally:
            self._end(request.request_id)

    def _begin(self, request_id: str) -> None:
        if not self._asked:
            self._busy_since = time.monotonic()
        self._asked.add(request_id)
        self._idle.clear()

    def _end(self, request_id: str) -> None:
        self._partial.pop(request_id, None)
        self._running.discard(request_id)
        if request_id in self._asked:
            self._asked.discard(request_id)
            if not self._asked:
                self._busy_seconds += time.monotonic() - self._busy_since
                self._idle.set()

    async def _ask(self, request: GenerateRequest, started: float) -> Generation:
        resume = request.resume
        known = request.prompt
        done = 0
        if resume is not None:
            known = np.concatenate([known, resume.token_ids])
            done = resume.token_ids.size
        limit = min(request.sampling.max_new_tokens, self._context - request.prompt.size) - done
        if limit < 1 and resume is not None:
            return joined(request, None, FinishReason.LENGTH, time.monotonic() - started)
        ask = Ask(
            request_id=request.request_id,
            token_ids=known,
            sampled=done,
            limit=limit,
            sampling=request.sampling,
            seed=request.seed,
            salt=f"version-{self._version}",
            constraint=request.constraint,
        )
        answer = await self._server.generate(ask, self._teller(request))
        generation = Generation(
            request_id=request.request_id,
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            versions=self._spans(answer),
            finish_reason=answer.finish_reason,
            seconds=0.0,
        )
        self._generated += answer.token_ids.size
        self._prefilled += answer.prefilled
        return joined(request, generation, generation.finish_reason, time.monotonic() - started)

    def _teller(self, request: GenerateRequest) -> Tell | None:
        on_tokens = request.on_tokens
        if on_tokens is None:
            return None

        async def tell(token_ids: Sequence[int]) -> None:
            # What is sampled under unproven weights is not told.
            await self._pass(self._proof)
            on_tokens(np.array(token_ids, dtype=np.int32))
            told = self._partial.get(request.request_id, 0)
            self._partial[request.request_id] = told + len(token_ids)

        return tell

    def _spans(self, answer: Answer) -> tuple[VersionSpan, ...]:
        versions = np.zeros(answer.token_ids.size, dtype=np.int64)
        for name, start, end in answer.weights:
            if name not in self._names:
                raise EngineError(
                    f"{self._server.client.url}: tokens of weights {name!r}, which this node did "
                    "not send; is another node using the server?"
                )
            versions[start:end] = self._names[name]
        return spans_of(versions)

    def _patch(self, updates: Mapping[str, Update]) -> None:
        """Raises `EngineError`: the model has no such tensor, or of another shape."""
        for name, update in updates.items():
            held = self._weights.get(name)
            if held is None:
                raise EngineError(
                    f"weight {name!r}: the model has no such tensor; send Hugging Face names "
                    "(adapters are served by the torch engine only)"
                )
            if isinstance(update, ChangedElements):
                held.reshape(-1)[update.positions] = update.values
            elif update.shape == held.shape and update.dtype == held.dtype:
                held[...] = update
            else:
                raise EngineError(
                    f"weight {name!r}: {update.dtype}{list(update.shape)}, the model has "
                    f"{held.dtype}{list(held.shape)}"
                )


async def _follows_constraints(server: Server[Any]) -> bool:
    """Asked by one token: it takes a tokenizer and a grammar backend, which a server may lack."""
    ask = Ask(
        request_id="follows-constraints",
        token_ids=np.array([1], dtype=np.int32),
        sampled=0,
        limit=1,
        sampling=Sampling(temperature=0.0, max_new_tokens=1),
        seed=0,
        salt="follows-constraints",
        constraint=Constraint(ConstraintKind.REGEX, "[0-9]+", "follows-constraints"),
    )
    try:
        await server.generate(ask, None)
    except EngineError:
        return False
    return True
