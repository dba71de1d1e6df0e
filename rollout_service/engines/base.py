"""The engine's contract.

An engine turns token ids into token ids. It holds the weights, so it alone stamps the policy
version on what it samples. The node calls it from its event loop; an engine does its heavy work
elsewhere.

The order of an update is strict: the caller stages and verifies the weights on the host, then
`swap`, which pauses, applies, proves and resumes by itself between two decode steps. Nothing that
was sampled under new weights leaves the engine before their canary agrees.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from leeway.config import UpdateMode
from leeway.errors import EngineError
from leeway.manifests import Canary
from leeway.trajectory import FinishReason, Float32Array, Int32Array, Sampling
from leeway.versions import VersionSpan, expand, spans_of
from rollout_service.engines.constraint import Constraint


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """One sequence to be generated.

    Attributes:
        prompt: int32 [prompt].
        seed: With `sampling`, determines the tokens under given weights, whatever else runs in the
            same batch: each token's draw depends only on (seed, position).
        resume: A partial generation to be continued; its tokens count against max_new_tokens, and
            its log-probabilities and versions are kept as they are.
        constraint: What the answer is held to; its log-probabilities are then those of the
            constrained distribution, and no importance ratio can be made of them.
        on_tokens: Called in the event loop with further sampled ids, in order, while they come; the
            last ones may be in the generation only.
    """

    request_id: str
    prompt: Int32Array
    sampling: Sampling
    seed: int
    resume: Generation | None = None
    constraint: Constraint | None = None
    on_tokens: Callable[[Int32Array], None] | None = None


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


@dataclass(frozen=True, slots=True, eq=False)
class ChangedElements:
    """What changes in one tensor: int64 [k], ascending flat positions, and [k], their new values
    in the tensor's dtype (bf16 as uint16)."""

    positions: npt.NDArray[np.int64]
    values: npt.NDArray[Any]


Update = npt.NDArray[Any] | ChangedElements
"""A tensor's new values: all of them, in its shape, or those that change."""


class CanaryError(EngineError):
    """The engine's log-probabilities are not those of the weights it was given."""


def check_request(engine: Engine, request: GenerateRequest) -> None:
    """What every engine refuses.

    Raises:
        EngineError: no room for an answer, ids that the model does not know, nothing to resume, or
            a constraint that this engine cannot hold an answer to.
    """
    context = engine.context_length
    name = f"request {request.request_id!r}: prompt"
    check_tokens(name, request.prompt, context, engine.vocabulary_size)
    if request.resume is None and request.prompt.size >= context:
        raise EngineError(
            f"{name} of {request.prompt.size} tokens leaves no room in the context of {context}; "
            "shorten the prompt or raise model.context"
        )
    if request.resume is not None and request.resume.finish_reason is not FinishReason.UNFINISHED:
        raise EngineError(
            f"request {request.request_id!r}: resume has ended "
            f"({request.resume.finish_reason.name}); resume unfinished generations only"
        )
    if request.constraint is not None:
        _check_constraint(engine, request, request.constraint)


def _check_constraint(engine: Engine, request: GenerateRequest, constraint: Constraint) -> None:
    if not engine.takes_constraints:
        raise EngineError(
            f"{constraint}: this engine cannot constrain an answer; ask for the format in the "
            "prompt and reward it, or use rollout.engine.kind sglang or vllm, its server started "
            "with a tokenizer (without --skip-tokenizer-init) and a grammar backend"
        )
    if request.resume is not None:
        raise EngineError(
            f"{constraint}: no server goes on in the middle of a constrained answer; ask anew"
        )


def check_tokens(name: str, tokens: Int32Array, context: int, vocabulary: int) -> None:
    """Raises `EngineError` for ids that the model cannot take."""
    if tokens.size == 0:
        raise EngineError(f"{name} is empty; give at least one token")
    if tokens.size > context:
        raise EngineError(
            f"{name} of {tokens.size} tokens is longer than the context of {context}; shorten it "
            "or raise model.context"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        raise EngineError(
            f"{name} holds id {low if low < 0 else high}, outside the vocabulary of {vocabulary}; "
            "is it another model's tokenizer?"
        )


def prove(canary: Canary, version: int, logprobs: Float32Array) -> None:
    """Compares an engine's log-probabilities of the canary, float32 [n - 1], with the trainer's.

    Raises:
        CanaryError: they differ by more than the canary tolerates.
    """
    deviation = canary.deviation(logprobs)
    if not deviation <= canary.tolerance:
        raise CanaryError(
            f"version {version}: the canary's log-probabilities differ by {deviation:.3g} from the "
            f"trainer's, more than {canary.tolerance:g}; the engine does not hold the weights it "
            "was given (where both compute in lower precision, raise weights.canary_tolerance)"
        )


def joined(
    request: GenerateRequest,
    generation: Generation | None,
    finish: FinishReason,
    seconds: float,
) -> Generation:
    """A generation behind the one that it resumes."""
    parts = [part for part in (request.resume, generation) if part is not None]
    versions = np.concatenate([expand(part.versions) for part in parts])
    return Generation(
        request_id=request.request_id,
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=spans_of(versions),
        finish_reason=finish,
        seconds=seconds + (request.resume.seconds if request.resume is not None else 0.0),
    )


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


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How an engine copes with what it was given.

    Attributes:
        kv_use: The part of its KV cache that is in use, 0 to 1.
        waiting: Sequences that it was given and does not run; 0 during an update, which holds them.
        preemptions: Since its start: running sequences that it put back for want of memory.
    """

    kv_use: float
    waiting: int
    preemptions: int


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

    @property
    def takes_constraints(self) -> bool:
        """Whether an answer can be held to a `Constraint`, of any kind."""
        ...

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
        self,
        updates: Mapping[str, Update],
        version: int,
        mode: UpdateMode,
        canary: Canary | None = None,
    ) -> float:
        """Puts new weights in place: under Hugging Face names, what changed.

        With a canary, nothing that the new weights sampled is yielded before it agrees; when it
        does not, the engine is broken, and all that is pending fails with the same error.

        Returns once the new version generates: the seconds for which generation stood still.

        Raises:
            CanaryError: the engine does not hold what it was given.
        """
        ...

    def progress(self, request_ids: Collection[str]) -> int:
        """Tokens generated so far by those of the requests that have not ended."""
        ...

    def stats(self) -> EngineStats: ...

    async def load(self) -> EngineLoad:
        """Raises `InfrastructureError` when the engine does not answer."""
        ...

    async def close(self) -> None: ...
