"""Sessions: one agent's trajectory while it grows.

A session's key names it; everything asked with that key becomes one trajectory. The dialects and
the environment workflow call `Session.ask`; `answering` samples.

What must hold:
- What is drawn follows the run's own sampling, whatever temperature the client asks for: behaviour
  log-probabilities mean the same on both sides of the queue.
- A retry gets the answer of the call that it repeats, finished or under way.
- A call belongs to its session and ends with it; what no client received is no part of the
  trajectory.
"""

from __future__ import annotations

import asyncio
import math
import numbers
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from leeway.errors import DataError, RewardError
from leeway.trajectory import Sampling
from rollout_service.answers import Delta
from rollout_service.gateway.conversation import Conversation
from rollout_service.gateway.messages import Message
from rollout_service.gateway.placing import History
from rollout_service.gateway.requests import Ask, Completion, SessionError


class Call:
    """One request under way: any number of readers may follow it from its beginning."""

    def __init__(self) -> None:
        self.call_id = f"msg_{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.completion: asyncio.Task[Completion] | None = None
        self.deltas: list[tuple[int, Delta]] = []
        self._grown = asyncio.Event()

    @property
    def failed(self) -> bool:
        task = self.completion
        return (
            task is not None and task.done() and (task.cancelled() or task.exception() is not None)
        )

    def grow(self, choice: int, deltas: Sequence[Delta]) -> None:
        self.deltas.extend((choice, delta) for delta in deltas)
        self._grown.set()

    async def result(self) -> Completion:
        """A reader that leaves does not end the call.

        Raises:
            SessionError: the session ended before.
            LeewayError: the answer could not be sampled; see `answering.Gateway.answer`.
        """
        assert self.completion is not None  # set by `Session.ask` before anyone has the call
        if not self.completion.done():
            await asyncio.wait({self.completion})
        if self.completion.cancelled():
            raise SessionError("the session ended before its answer")
        return self.completion.result()

    async def deliver(self) -> Completion:
        """The result, for a caller that surely receives it."""
        completion = await self.result()
        completion.delivered()
        return completion

    async def begun(self) -> None:
        """Returns with the first text; raises what `result` raises if there is none."""
        assert self.completion is not None
        self.completion.add_done_callback(lambda _: self._grown.set())
        while not self.deltas:
            if self.completion.done():
                await self.result()
                return
            self._grown.clear()
            await self._grown.wait()

    async def follow(self) -> AsyncIterator[tuple[int, Delta]]:
        """All deltas by choice, until the answer is whole."""
        assert self.completion is not None
        self.completion.add_done_callback(lambda _: self._grown.set())
        seen = 0
        while True:
            while seen < len(self.deltas):
                yield self.deltas[seen]
                seen += 1
            if self.completion.done():
                return
            self._grown.clear()
            await self._grown.wait()


@dataclass(slots=True)
class Outcome:
    """What a session was worth: `score` is measured, `reward` is learned from if it differs."""

    score: float | None = None
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)


class Session:
    """One trajectory in the making; opened and closed by its `Gateway`.

    Args:
        answer: Samples the answers to a request.
    """

    def __init__(
        self,
        answer: Callable[[Session, Ask, Call], Coroutine[Any, Any, Completion]],
        sampling: Sampling,
        seed: int,
    ) -> None:
        self.session_id = uuid.uuid4().hex
        self.key = f"sk-leeway-{secrets.token_urlsafe(24)}"
        self.conversation = Conversation()
        self.outcome = Outcome()
        self.closed = asyncio.Event()
        self._answer = answer
        self._sampling = sampling
        self._seed = seed
        self._asked = 0
        self._calls: dict[str, Call] = {}
        self._tasks: set[asyncio.Task[Completion]] = set()

    @property
    def sampling(self) -> Sampling:
        return self._sampling

    @property
    def tokens(self) -> int:
        """Sampled so far."""
        return sum(answer.token_ids.size for answer in self.conversation.answers)

    def ask(self, ask: Ask, key: str, *, retry: bool = False) -> Call:
        """Begins a call, or finds the one that this repeats.

        Args:
            key: The client's idempotency key, or else what tells its request from others.
            retry: An earlier call of this key is meant, whatever became of it.

        Raises:
            SessionError: the session is closed.
        """
        if self.closed.is_set():
            raise SessionError("the session is closed")
        earlier = self._calls.get(key)
        if earlier is not None and retry and not earlier.failed:
            return earlier
        call = Call()
        call.completion = asyncio.create_task(self._answer(self, ask, call))
        self._tasks.add(call.completion)
        call.completion.add_done_callback(self._tasks.discard)
        self._calls[key] = call
        return call

    def said(self, answer_id: str) -> tuple[Message, ...]:
        """The conversation up to and with an answer.

        Raises:
            DataError: no such answer, or it answered raw text.
        """
        history = self.conversation.find(answer_id).history
        assert isinstance(history, History)  # every answer that `Gateway` adds has one
        return history.messages

    def next_seed(self, asked: int | None) -> int:
        """A function of the session's seed and of what is asked for, or of its place."""
        if asked is None:
            self._asked += 1
            return hash_seed(self._seed, "answer", self._asked)
        return hash_seed(self._seed, "asked", asked)

    def rate(self, reward: Any, *, turn: str | None = None) -> None:
        """Rates one answer, by default the last.

        Raises:
            DataError: no such answer, or no finite number.
        """
        self.conversation.reward_turn(number(reward, "reward"), turn)

    def finish(self, outcome: Mapping[str, Any] | float) -> None:
        """Says what the session was worth: a score, or {"score", "reward", other parts}.

        Raises:
            DataError: something in it is no finite number.
        """
        values = dict(outcome) if isinstance(outcome, Mapping) else {"score": outcome}
        parts = {str(name): number(value, str(name)) for name, value in values.items()}
        if "score" in parts:
            self.outcome.score = parts.pop("score")
        if "reward" in parts:
            self.outcome.reward = parts.pop("reward")
        self.outcome.parts.update(parts)

    def worth(self) -> tuple[float, float]:
        """Score and reward: shaped reward (or else the score) plus what single turns earned.

        Raises:
            RewardError: nobody rated the session.
        """
        score, reward = self.outcome.score, self.outcome.reward
        turns = self.conversation.turn_reward
        rated = any(answer.reward is not None for answer in self.conversation.delivered)
        if score is None and reward is None and not rated:
            raise RewardError(
                "the session ended without a reward; return a number from `run`, or send one to "
                "/sessions/{id}/rewards or /sessions/{id}/close"
            )
        learned = (reward if reward is not None else score or 0.0) + turns
        return (learned if score is None else score), learned

    async def end(self) -> None:
        """No more can be asked; what is under way is cancelled, what nobody received dropped."""
        self.closed.set()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def hash_seed(*parts: object) -> int:
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode())


def number(value: Any, name: str) -> float:
    """A finite number.

    Raises:
        DataError: it is none; true and false are none either.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise DataError(f"{name} = {value!r:.80} ({type(value).__name__}): send a number")
    if not math.isfinite(value):
        raise DataError(f"{name} = {value}: send a finite number")
    return float(value)
