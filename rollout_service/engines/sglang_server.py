"""SGLang as a `Server`; shapes are those of SGLang 0.5.23.

Behaviour log-probabilities are SGLang's `output_token_logprobs`: after temperature, over the whole
vocabulary. Draws with top_p or top_k are therefore refused. Seeds are given, and ignored by some
backends of the server.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from leeway.config import UpdateMode
from leeway.errors import EngineError
from leeway.trajectory import FinishReason, Float32Array, Int32Array, Sampling
from rollout_service.engines.base import EngineLoad
from rollout_service.engines.constraint import Constraint, ConstraintKind
from rollout_service.engines.server import Answer, Ask, Tell
from rollout_service.engines.server_client import ANSWER_SECONDS, ServerClient
from rollout_service.engines.stored_weights import Weights, as_tensor

_PAUSE_MODES = {UpdateMode.IN_PLACE: "in_place", UpdateMode.RECOMPUTE: "retract"}
_FINISHED = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_ONE_TOKEN = {"max_new_tokens": 1, "temperature": 0.0}
_CONSTRAINTS = {
    ConstraintKind.JSON_SCHEMA: "json_schema",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.GRAMMAR: "ebnf",
}


class SglangServer:
    """See the module's docstring, and rollout_service.engines.server for the contract."""

    def __init__(self, url: str) -> None:
        self.client = ServerClient(url)
        # Sequences that the server put back for want of memory, and how often updates did so.
        self._retracted = self._updates_retracting = 0

    async def ready(self, seconds: float) -> None:
        await self.client.ready("/ready", seconds)

    async def probe(self) -> Collection[str]:
        body = {"input_ids": [1], "sampling_params": _ONE_TOKEN, "return_logprob": True}
        answer = await self._generate(body)
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
                f"{self.client.url}: the server returns no {', '.join(lacking)}; use SGLang "
                "0.5.23 or newer"
            )
        return ["default", *(span["version"] for span in meta["weight_versions"])]

    def check(self, sampling: Sampling) -> None:
        if sampling.temperature > 0.0 and (sampling.top_p < 1.0 or sampling.top_k > 0):
            raise EngineError(
                f"sampling.top_p = {sampling.top_p}, sampling.top_k = {sampling.top_k}: SGLang's "
                "log-probabilities are over the whole vocabulary; use top_p=1.0 and top_k=0"
            )

    async def generate(self, ask: Ask, tell: Tell | None) -> Answer:
        body = {
            "rid": ask.request_id,
            "input_ids": ask.token_ids.tolist(),
            "sampling_params": {
                "max_new_tokens": ask.limit,
                "temperature": ask.sampling.temperature,
                "sampling_seed": ask.seed & 0x7FFFFFFF,
                **_held_to(ask.constraint),
            },
            "return_logprob": True,
            "extra_key": ask.salt,
        }
        updates = self._updates_retracting
        answer = await (self._generate(body) if tell is None else self._follow(body, tell))
        meta = answer["meta_info"]
        by_updates = self._updates_retracting - updates
        self._retracted += max(0, int(meta.get("total_retractions", 0)) - by_updates)
        pairs = meta["output_token_logprobs"]
        spans = meta["weight_versions"]
        return Answer(
            token_ids=np.array([pair[1] for pair in pairs], dtype=np.int32),
            logprobs=np.array([pair[0] for pair in pairs], dtype=np.float32),
            weights=[(span["version"], span["start"], span["end"]) for span in spans],
            finish_reason=_FINISHED.get(meta["finish_reason"]["type"], FinishReason.UNFINISHED),
            prefilled=int(meta["prompt_tokens"]) - int(meta["cached_tokens"]),
        )

    async def abort(self, request_id: str) -> None:
        await self.client.post("/abort_request", {"rid": request_id})

    def stage(self, weights: Weights, changed: Collection[str]) -> str:
        """What /update_weights_from_tensor takes: a pickle, which the node's own server reads by
        an allow-list.

        By value: the server ends on torch's default of sharing memory by file descriptors.
        """
        named = [(name, as_tensor(weights[name]).clone()) for name in changed]
        return base64.b64encode(pickle.dumps(named)).decode()

    async def replace(self, staged: str, name: str, mode: UpdateMode) -> None:
        pause = _PAUSE_MODES.get(mode, "in_place")
        await self.client.post("/pause_generation", {"mode": pause})
        self._updates_retracting += mode is UpdateMode.RECOMPUTE
        await self.client.post("/begin_weight_update")
        await self.client.post(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": [staged],
                "weight_version": name,
                # With requests in flight on old keys and values there is nothing to flush.
                "flush_cache": mode is UpdateMode.RECOMPUTE,
                "abort_all_requests": False,
            },
        )
        await self.client.post("/end_weight_update")
        await self.client.post("/continue_generation")

    async def load(self) -> EngineLoad:
        ranks = json.loads(await self.client.get("/v1/loads"))["loads"]
        usage = max(float(rank["token_usage"]) for rank in ranks)
        waiting = sum(int(rank["num_waiting_reqs"]) for rank in ranks)
        return EngineLoad(usage, waiting, self._retracted)

    async def logprobs(self, token_ids: Int32Array, salt: str) -> Float32Array:
        answer = await self._generate(
            {
                "input_ids": token_ids.tolist(),
                "sampling_params": _ONE_TOKEN,
                "return_logprob": True,
                "logprob_start_len": 0,
                "extra_key": salt,
            }
        )
        pairs = answer["meta_info"]["input_token_logprobs"][1:]
        return np.array([pair[0] for pair in pairs], dtype=np.float32)

    async def _generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return dict(await self.client.post("/generate", body, ANSWER_SECONDS))

    async def _follow(self, body: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
        """Each event holds all so far."""
        told = 0
        answer: dict[str, Any] = {}
        async for answer in self.client.stream("/generate", body):
            finish = answer["meta_info"].get("finish_reason") or {}
            if finish.get("status_code") is not None:
                # What it would refuse with that status, were it not a stream.
                raise self.client.refusal("/generate", finish["status_code"], finish["message"])
            ids = answer["output_ids"]
            if not finish and len(ids) > told:
                await tell(ids[told:])
                told = len(ids)
        return answer


def _held_to(constraint: Constraint | None) -> dict[str, str]:
    return {} if constraint is None else {_CONSTRAINTS[constraint.kind]: constraint.text}
