"""vLLM as a `Server`; shapes are those of vLLM 0.32.

It is started with `--enable-scale-out`, for ids in and out, `--logprobs-mode processed_logprobs`,
for log-probabilities of the distribution that was sampled from (after temperature, over the support
of top_k and top_p), and VLLM_SERVER_DEV_MODE=1, for updates. `probe` finds out what is missing.

New weights go through a file that both can read, whose path the server is told: vLLM reloads a
checkpoint layer by layer, so that what its kernels packed is packed anew. Nothing is pickled.
`recompute` is a reset of the prefix cache that sends running requests back to be prefilled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file

from leeway.config import UpdateMode
from leeway.errors import EngineError, InfrastructureError
from leeway.trajectory import FinishReason, Float32Array, Int32Array, Sampling
from rollout_service.engines.base import EngineLoad
from rollout_service.engines.constraint import Constraint, ConstraintKind
from rollout_service.engines.server import Answer, Ask, Tell
from rollout_service.engines.server_client import ANSWER_SECONDS, ServerClient
from rollout_service.engines.stored_weights import Weights, as_tensor

_GENERATE = "/inference/v1/generate"
_FINISHED = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
# What the server says where it has no number: log-probabilities below are never sampled.
_NO_LOGPROB = -9999.0
_CONSTRAINTS = {
    ConstraintKind.JSON_SCHEMA: "json",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.GRAMMAR: "grammar",
}
_FLAGS = (
    "start vLLM 0.32 or newer with --enable-scale-out --logprobs-mode processed_logprobs, and "
    "VLLM_SERVER_DEV_MODE=1 in its environment"
)


class VllmServer:
    """See the module's docstring, and rollout_service.engines.server for the contract."""

    def __init__(self, url: str, stop_tokens: Collection[int]) -> None:
        """
        Args:
            stop_tokens: Ids that end an answer; a server without a tokenizer knows none.
        """
        self.client = ServerClient(url)
        self._stop_tokens = sorted(stop_tokens)
        self._asked = 0
        # Preemptions: those for want of memory, and those that updates asked for.
        self._preempted = self._by_updates = 0

    async def ready(self, seconds: float) -> None:
        await self.client.ready("/health", seconds)

    async def probe(self) -> Collection[str]:
        # Of a support of one token the log-probability is 0, unless it is that of the raw logits.
        draw = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0}
        try:
            await self.client.post("/resume")
            answer = await self._generate({"token_ids": [1], "sampling_params": draw})
        except EngineError as error:
            raise EngineError(f"{error}; {_FLAGS}") from error
        choice = answer["choices"][0]
        names = [span["version"] for span in choice.get("weight_versions") or []]
        logprobs = _logprobs(choice)
        if not (names and len(logprobs) == 1 and abs(logprobs[0]) < 1e-6):
            raise EngineError(
                f"{self.client.url}: the server returns no log-probabilities of the distribution "
                f"that it samples from, or no weight_versions; {_FLAGS}"
            )
        await self.load()
        return names

    def check(self, sampling: Sampling) -> None:
        """All draws are reported as they are."""

    async def generate(self, ask: Ask, tell: Tell | None) -> Answer:
        body = {
            "request_id": ask.request_id,
            "token_ids": ask.token_ids.tolist(),
            "sampling_params": {
                "max_tokens": ask.limit,
                "temperature": ask.sampling.temperature,
                "top_p": ask.sampling.top_p,
                "top_k": ask.sampling.top_k,
                # Draws begin anew in a continued request: not with the same numbers.
                "seed": (ask.seed + ask.sampled) & 0x7FFFFFFF,
                "logprobs": 0,
                "stop_token_ids": self._stop_tokens,
                "detokenize": False,
                **_held_to(ask.constraint),
            },
            "cache_salt": ask.salt,
        }
        self._asked += 1
        try:
            answer = await (self._generate(body) if tell is None else self._follow(body, tell))
        finally:
            self._asked -= 1
        choice = answer["choices"][0]
        logprobs = np.array(_logprobs(choice), dtype=np.float32)
        if (logprobs <= _NO_LOGPROB).any():
            raise InfrastructureError(
                f"{self.client.url}: a token that was sampled has no log-probability; do the "
                "weights hold NaN?"
            )
        usage = answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        spans = choice["weight_versions"] or []
        return Answer(
            token_ids=np.array(choice["token_ids"], dtype=np.int32),
            logprobs=logprobs,
            weights=[(span["version"], span["start"], span["end"]) for span in spans],
            finish_reason=_FINISHED.get(choice["finish_reason"], FinishReason.UNFINISHED),
            prefilled=int(usage["prompt_tokens"]) - int(cached),
        )

    async def abort(self, request_id: str) -> None:
        await self.client.post(
            "/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]}
        )

    def stage(self, weights: Weights, changed: Collection[str]) -> TemporaryDirectory[str]:
        """A checkpoint of all weights, readable by this user alone."""
        directory = TemporaryDirectory(prefix="leeway-weights-")
        tensors = {name: as_tensor(array) for name, array in weights.items()}
        save_file(tensors, Path(directory.name) / "model.safetensors")
        return directory

    async def replace(self, staged: TemporaryDirectory[str], name: str, mode: UpdateMode) -> None:
        with staged as directory:
            await self.client.post("/pause?mode=keep")
            if mode is UpdateMode.RECOMPUTE:
                # It counts each once it goes on.
                self._by_updates += self._asked
                await self.client.post("/reset_prefix_cache?reset_running_requests=true")
            await self.client.post(
                "/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": directory}},
            )
            await self.client.post("/update_weight_version", {"new_version": name})
            await self.client.post("/resume")

    async def load(self) -> EngineLoad:
        """From its metrics. Raises `EngineError` when it keeps none."""
        values: dict[str, list[float]] = {}
        for family in text_string_to_metric_families(await self.client.get("/metrics")):
            for sample in family.samples:
                values.setdefault(sample.name, []).append(sample.value)
        try:
            usage = max(values["vllm:kv_cache_usage_perc"])
            waiting = sum(values["vllm:num_requests_waiting"])
            preempted = sum(values["vllm:num_preemptions_total"])
        except KeyError as missing:
            raise EngineError(
                f"{self.client.url}/metrics: no {missing}; start vLLM without --disable-log-stats"
            ) from missing
        self._preempted = max(self._preempted, int(preempted) - self._by_updates)
        return EngineLoad(usage, int(waiting), self._preempted)

    async def logprobs(self, token_ids: Int32Array, salt: str) -> Float32Array:
        draw = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = await self._generate(
            {"token_ids": token_ids.tolist(), "sampling_params": draw, "cache_salt": salt}
        )
        after = zip(token_ids[1:], answer["prompt_logprobs"][1:], strict=True)
        return np.array([entry[str(token)]["logprob"] for token, entry in after], dtype=np.float32)

    async def _generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return dict(await self.client.post(_GENERATE, body, ANSWER_SECONDS))

    async def _follow(self, body: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
        """Each event holds what is new; the last ones say how it ended, and what it took."""
        token_ids: list[int] = []
        logprobs: list[dict[str, Any]] = []
        last: dict[str, Any] = {}
        usage: dict[str, Any] = {}
        wishes = {**body, "stream_options": {"include_usage": True}}
        async for event in self.client.stream(_GENERATE, wishes):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                last = choice
                token_ids += choice["token_ids"]
                logprobs += choice["logprobs"]["content"] if choice["token_ids"] else []
                if choice["finish_reason"] is None:
                    await tell(choice["token_ids"])
        whole = {**last, "token_ids": token_ids, "logprobs": {"content": logprobs}}
        return {"choices": [whole], "usage": usage}


def _logprobs(choice: Mapping[str, Any]) -> list[float]:
    content = (choice.get("logprobs") or {}).get("content") or []
    return [entry["logprob"] for entry in content]


def _held_to(constraint: Constraint | None) -> dict[str, Any]:
    if constraint is None:
        return {}
    return {"structured_outputs": {_CONSTRAINTS[constraint.kind]: constraint.text}}
