"""The `Engine` named `sglang`: an SGLang server beside the node, owned or adopted.

What must hold:
- Ids in, ids out: text never reaches the server. Ids outside the vocabulary are refused here, since
  one of them ends the server.
- The server stamps versions, by the name that each update gives its weights.
- New weights are handed over whole: the server has no way to take changed elements, so that a copy
  of all weights is kept here and patched.
- An update is: close the gate, pause, replace, continue, prove by the canary, open the gate.
  Nothing that was sampled meanwhile is yielded before the proof.
- Prefix caches are salted by version: a cache of the old policy is never reused, also where running
  requests go on with theirs (`in_place`).

Behaviour log-probabilities are SGLang's `output_token_logprobs`: after temperature, over the whole
vocabulary. Requests with top_p or top_k are therefore refused. Seeds are given, and ignored by some
backends of the server.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from leeway.config import UpdateMode
from leeway.errors import EngineError, InfrastructureError, LeewayError
from leeway.manifests import Canary
from leeway.trajectory import FinishReason, Int32Array
from leeway.versions import VersionSpan, spans_of
from rollout_service.engines.base import (
    CanaryError,
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
from rollout_service.engines.sglang_client import SglangClient
from rollout_service.engines.stored_weights import load_weights

_PAUSE_MODES = {UpdateMode.IN_PLACE: "in_place", UpdateMode.RECOMPUTE: "retract"}
_FINISHED = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class SglangEngine:
    """See the module's docstring, and rollout_service.engines.base for the contract."""

    def __init__(
        self, client: SglangClient, directory: Path, context: int, vocabulary: int, version: int
    ) -> None:
        self._client = client
        self._context = context
        self._vocabulary = vocabulary
        self._version = version
        self._weights = load_weights(directory)
        self._names = {"default": version, str(version): version}
        self._running: set[str] = set()
        self._partial: dict[str, int] = {}
        self._broken: LeewayError | None = None
        # Closed while an update is under way: nothing begins, and nothing is yielded.
        self._gate = asyncio.Event()
        self._gate.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy_since = 0.0
        self._generated = self._prefilled = self._pauses = 0
        # Sequences that the server put back for want of memory, and how often updates did so.
        self._retracted = self._updates_retracting = 0
        self._busy_seconds = self._pause_seconds = 0.0

    @classmethod
    async def connect(
        cls, url: str, directory: Path, *, start_seconds: float, context: int | None = None
    ) -> SglangEngine:
        """Waits for the server, and checks that it can do what the contract asks.

        Args:
            directory: The model that the server serves, with the weights that it has now.

        Raises:
            DeadlineError: no server was ready in time.
            EngineError: it serves another model, or without ids and log-probabilities.
        """
        client = SglangClient(url)
        await client.ready(start_seconds)
        model = AutoConfig.from_pretrained(directory).get_text_config()
        longest = int(model.max_position_embeddings)
        engine = cls(client, directory, min(context or longest, longest), model.vocab_size, 0)
        await engine._check_capabilities()
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

    def check(self, request: GenerateRequest) -> None:
        check_request(request, self._context, self._vocabulary)
        sampling = request.sampling
        if sampling.temperature > 0.0 and (sampling.top_p < 1.0 or sampling.top_k > 0):
            raise EngineError(
                f"sampling.top_p = {sampling.top_p}, sampling.top_k = {sampling.top_k}: SGLang's "
                "log-probabilities are over the whole vocabulary; use top_p=1.0 and top_k=0"
            )

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Generation]:
        for request in requests:
            self.check(request)
        ids = [request.request_id for request in requests]
        if len(set(ids)) < len(ids) or self._running.intersection(ids):
            raise EngineError(f"request_id: each must be unique, got {ids}")
        if self._broken is not None:
            raise self._broken
        if not self._running:
            self._busy_since = time.monotonic()
        self._running.update(ids)
        self._idle.clear()
        tasks = [asyncio.create_task(self._generate(request)) for request in requests]
        return self._read(tasks)

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._running:
                await self._client.control("/abort_request", {"rid": request_id})

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
        changed = await asyncio.to_thread(self._patch, updates)
        payload = await asyncio.to_thread(_serialise, changed)
        self._gate.clear()
        try:
            if mode is UpdateMode.DRAIN:
                await self._idle.wait()
            started = time.monotonic()
            await self._client.control(
                "/pause_generation", {"mode": _PAUSE_MODES.get(mode, "in_place")}
            )
            self._updates_retracting += mode is UpdateMode.RECOMPUTE
            self._names[str(version)] = version
            await self._client.control("/begin_weight_update")
            await self._client.control(
                "/update_weights_from_tensor",
                {
                    "serialized_named_tensors": [payload],
                    "weight_version": str(version),
                    # With requests in flight on old keys and values there is nothing to flush.
                    "flush_cache": mode is UpdateMode.RECOMPUTE,
                    "abort_all_requests": False,
                },
            )
            await self._client.control("/end_weight_update")
            self._version = version
            await self._client.control("/continue_generation")
            seconds = time.monotonic() - started
            if canary is not None:
                prove(canary, version, await self._logprobs(canary.token_ids))
        except LeewayError as error:
            self._broken = error
            raise
        finally:
            self._gate.set()
        self._pauses += 1
        self._pause_seconds += seconds
        return seconds

    def stats(self) -> EngineStats:
        busy = time.monotonic() - self._busy_since if self._running else 0.0
        return EngineStats(
            running=len(self._running),
            waiting=0,
            tokens_generated=self._generated,
            tokens_prefilled=self._prefilled,
            busy_seconds=self._busy_seconds + busy,
            pauses=self._pauses,
            pause_seconds=self._pause_seconds,
        )

    async def load(self) -> EngineLoad:
        ranks = await self._client.loads()
        usage = max(float(rank["token_usage"]) for rank in ranks)
        waiting = sum(int(rank["num_waiting_reqs"]) for rank in ranks)
        return EngineLoad(usage, waiting if self._gate.is_set() else 0, self._retracted)

    async def close(self) -> None:
        self._broken = self._broken or InfrastructureError("the SGLang engine was closed")
        await self._client.close()

    async def _check_capabilities(self) -> None:
        """One generated token: the health check that means something."""
        body = {
            "input_ids": [1],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
        }
        answer = await self._client.generate(body)
        meta = answer.get("meta_info", {})
        lacking = [
            name
            for name, found in [
                ("output_ids", answer.get("output_ids")),
                ("output_token_logprobs", meta.get("output_token_logprobs")),
                ("weight_versions", meta.get("weight_versions")),
            ]
            if not found
        ]
        if lacking:
            raise EngineError(
                f"{self._client.url}: the server returns no {', '.join(lacking)}; use SGLang "
                "0.5.23 or newer"
            )
        for span in meta["weight_versions"]:
            self._names.setdefault(span["version"], self._version)

    async def _read(self, tasks: Sequence[asyncio.Task[Generation]]) -> AsyncIterator[Generation]:
        try:
            for ended in asyncio.as_completed(tasks):
                generation = await ended
                await self._gate.wait()
                if isinstance(self._broken, CanaryError):
                    raise self._broken
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
            await self._gate.wait()
            return await self._ask(request, started)
        except asyncio.CancelledError:
            await self._client.control("/abort_request", {"rid": request.request_id})
            raise
        finally:
            self._partial.pop(request.request_id, None)
            self._running.discard(request.request_id)
            if not self._running:
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
        body = {
            "rid": request.request_id,
            "input_ids": known.tolist(),
            "sampling_params": {
                "max_new_tokens": limit,
                "temperature": request.sampling.temperature,
                "sampling_seed": request.seed & 0x7FFFFFFF,
            },
            "return_logprob": True,
            "extra_key": f"version-{self._version}",
        }
        updates = self._updates_retracting
        if request.on_tokens is None:
            answer = await self._client.generate(body)
        else:
            answer = await self._follow(request, body)
        meta = answer["meta_info"]
        pairs = meta["output_token_logprobs"]
        generation = Generation(
            request_id=request.request_id,
            token_ids=np.array([pair[1] for pair in pairs], dtype=np.int32),
            logprobs=np.array([pair[0] for pair in pairs], dtype=np.float32),
            versions=self._spans(meta["weight_versions"], len(pairs)),
            finish_reason=_FINISHED.get(meta["finish_reason"]["type"], FinishReason.UNFINISHED),
            seconds=0.0,
        )
        self._generated += len(pairs)
        by_updates = self._updates_retracting - updates
        self._retracted += max(0, int(meta.get("total_retractions", 0)) - by_updates)
        self._prefilled += int(meta["prompt_tokens"]) - int(meta["cached_tokens"])
        return joined(request, generation, generation.finish_reason, time.monotonic() - started)

    async def _follow(self, request: GenerateRequest, body: dict[str, Any]) -> dict[str, Any]:
        assert request.on_tokens is not None
        told = 0
        answer: dict[str, Any] = {}
        async for answer in self._client.stream(body):
            ids = answer["output_ids"]
            if answer["meta_info"].get("finish_reason") is None and len(ids) > told:
                # What is sampled under unproven weights is not told.
                await self._gate.wait()
                request.on_tokens(np.array(ids[told:], dtype=np.int32))
                told = len(ids)
                self._partial[request.request_id] = told
        if not answer:
            raise InfrastructureError(f"{self._client.url}/generate: the stream ended at once")
        return answer

    def _spans(self, spans: Sequence[Mapping[str, Any]], size: int) -> tuple[VersionSpan, ...]:
        versions = np.zeros(size, dtype=np.int64)
        for span in spans:
            if span["version"] not in self._names:
                raise EngineError(
                    f"{self._client.url}: tokens of weights {span['version']!r}, which this node "
                    "did not send; is another node using the server?"
                )
            versions[span["start"] : span["end"]] = self._names[span["version"]]
        return spans_of(versions)

    async def _logprobs(self, token_ids: Int32Array) -> Any:
        answer = await self._client.generate(
            {
                "input_ids": token_ids.tolist(),
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                "return_logprob": True,
                "logprob_start_len": 0,
                "extra_key": f"canary-{self._version}",
            }
        )
        pairs = answer["meta_info"]["input_token_logprobs"][1:]
        return np.array([pair[0] for pair in pairs], dtype=np.float32)

    def _patch(self, updates: Mapping[str, Update]) -> dict[str, Any]:
        """The tensors that change, whole.

        Raises:
            EngineError: the model has no such tensor, or of another shape.
        """
        changed = {}
        for name, update in updates.items():
            held = self._weights.get(name)
            if held is None:
                raise EngineError(
                    f"weight {name!r}: the model has no such tensor; send Hugging Face names "
                    "(adapters are not served by SGLang here)"
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
            changed[name] = held
        return changed


def _serialise(tensors: Mapping[str, Any]) -> str:
    """What /update_weights_from_tensor takes: a pickle, which the node's own server reads by an
    allow-list.

    By value: the server ends on torch's default of sharing memory by file descriptors.
    """
    named = [
        (name, torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).clone())
        for name, array in tensors.items()
    ]
    return base64.b64encode(pickle.dumps(named)).decode()
