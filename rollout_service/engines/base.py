"""The engine's contract.

An engine turns token ids into token ids. It holds the weights, so it alone stamps the policy
version on what it samples. The node calls it from its event loop; an engine does its heavy work
elsewhere.

The order of an update is strict: the caller stages and verifies the weights on the host, then
`swap`, which pauses, applies, and resumes by itself between two decode steps.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from leeway.config import UpdateMode
from leeway.trajectory import FinishReason, Float32Array, Int32Array, Sampling
from leeway.versions import VersionSpan


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """One sequence to be generated.

    Attributes:
        prompt: int32 [prompt].
        seed: With `sampling`, determines the tokens under given weights, whatever else runs in the
            same batch: each token's draw depends only on (seed, position).
        resume: A partial generation to be continued; its tokens count against max_new_tokens, and
            its log-probabilities and versions are kept as they are.
    """

    request_id: str
    prompt: Int32Array
    sampling: Sampling
    seed: int
    resume: Generation | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What was sampled for one request.

    Attributes:
        token_ids: int32 [n], the stop token included.
        logprobs: float32 [n], of the distribution that was sampled from.
        versions: Spans over the n tokens.
        finish_reason: UNFINISHED when the request was aborted; it may be resumed elsewhere.
        seconds: From the request to its last token.
    """

    request_id: str
    token_ids: Int32Array
    logprobs: Float32Array
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start, and gauges."""

    running: int
    waiting: int
    tokens_generated: int
    tokens_prefilled: int
    busy_seconds: float
    pauses: int
    pause_seconds: float


class Engine(Protocol):
    """An inference engine.

    Errors: `EngineError` for a request it cannot serve (too long for the context, an id outside the
    vocabulary), raised by `generate` before anything is queued; `InfrastructureError` when the
    engine itself is broken.
    """

    @property
    def version(self) -> int:
        """The policy version of the weights in place."""
        ...

    @property
    def context_length(self) -> int: ...

    @property
    def vocabulary_size(self) -> int: ...

    def check(self, request: GenerateRequest) -> None:
        """Raises `EngineError` when this engine cannot serve the request."""
        ...

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Generation]:
        """Queues all requests at once, in order, and yields each as it ends, in order of ending.

        Requests with equal prompts share one prefill.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends the requests; `generate` yields what they have as UNFINISHED."""
        ...

    async def swap(
        self, tensors: Mapping[str, npt.NDArray[Any]], version: int, mode: UpdateMode
    ) -> float:
        """Puts tensors in place: under Hugging Face names, those that changed; bf16 as uint16.

        Returns once the new version generates: the seconds for which generation stood still.
        """
        ...

    async def logprobs(self, token_ids: Int32Array) -> npt.NDArray[np.float32]:
        """float32 [n - 1]: log-probability of each token after the first at temperature 1."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
