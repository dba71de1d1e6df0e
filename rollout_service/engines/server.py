"""What the engine asks of a server beside the node: one file per kind implements it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from leeway.config import UpdateMode
from leeway.trajectory import FinishReason, Float32Array, Int32Array, Sampling
from rollout_service.engines.base import EngineLoad
from rollout_service.engines.constraint import Constraint
from rollout_service.engines.server_client import ServerClient
from rollout_service.engines.stored_weights import Weights

Staged = TypeVar("Staged")


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """What a server is asked.

    Attributes:
        token_ids: int32 [n], all that is known: prompt and what was sampled before.
        sampled: How many of them, at the end, were sampled before.
        limit: Further tokens, at most; `sampling.max_new_tokens` counts those before as well.
        salt: Prefixes are shared only between requests of the same salt.
        constraint: Only where nothing was sampled before.
    """

    request_id: str
    token_ids: Int32Array
    sampled: int
    limit: int
    sampling: Sampling
    seed: int
    salt: str
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What it sampled.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n], of the distribution that was sampled from.
        weights: (name of the weights, start, end) over the n tokens.
        prefilled: Tokens of the prompt that it computed, not found in its cache.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    weights: Sequence[tuple[str, int, int]]
    finish_reason: FinishReason
    prefilled: int


Tell = Callable[[Sequence[int]], Awaitable[None]]
"""Given further sampled ids while they come; the last ones may be in the answer only."""


class Server(Protocol[Staged]):
    """One kind of server. Errors: `EngineError` for what it refuses, `InfrastructureError` when it
    is away or late."""

    client: ServerClient

    async def ready(self, seconds: float) -> None:
        """Waits for a server that starts. Raises `DeadlineError` when it was not ready in time."""
        ...

    async def probe(self) -> Collection[str]:
        """One generated token: the health check that means something.

        Returns the names by which the server knows the weights that it has now.

        Raises:
            EngineError: it lacks what training needs.
        """
        ...

    def check(self, sampling: Sampling) -> None:
        """Raises `EngineError` for draws whose log-probabilities the server does not report."""
        ...

    async def generate(self, ask: Ask, tell: Tell | None) -> Answer:
        """Raises `EngineError` for a constraint that the server cannot follow."""
        ...

    async def abort(self, request_id: str) -> None:
        """Its `generate` returns what it has, as UNFINISHED."""
        ...

    def stage(self, weights: Weights, changed: Collection[str]) -> Staged:
        """Makes an update ready while the server generates; called in a thread.

        Args:
            weights: All of them, as they shall be.
            changed: Names of those that differ.
        """
        ...

    async def replace(self, staged: Staged, name: str, mode: UpdateMode) -> None:
        """Pauses, puts the weights in place under the name, and goes on; `drain` finds no request
        under way."""
        ...

    async def load(self) -> EngineLoad:
        """Of its preemptions those for want of memory only, not those of updates."""
        ...

    async def logprobs(self, token_ids: Int32Array, salt: str) -> Float32Array:
        """float32 [n - 1]: of each id after those before it, at temperature 1."""
        ...
