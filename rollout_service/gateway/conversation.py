"""What was sampled in one session: a graph of answers, and the sequences they make.

Pure: no I/O, no clock, no tokenizer. An `Answer` holds the ids that the engine sampled and the
context that was put before them; its parent is the answer whose conversation it continues. A
session that always continues is a path; one that goes back, asks twice or forgets is a tree.

What must hold:
- Every id that may be trained is one that the engine sampled, and is trained once: of an answer's
  continuations the first goes on in its sequence, every other begins a new one, in which what they
  have in common is context.
- The loss mask says where an id came from, and nothing else: it is true of what the policy itself
  sampled. A constrained answer is drawn from another distribution, so that it is context.
- An answer that the client never received is in no sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from leeway.errors import DataError
from leeway.trajectory import BoolArray, FinishReason, Float32Array, Int32Array
from leeway.versions import VersionSpan, expand, spans_of


@dataclass(slots=True, eq=False)
class Answer:
    """One sampled answer.

    Attributes:
        parent: The answer that it continues.
        context: int32 [c], put between the parent's last id and this answer's first: the whole
            prompt where there is no parent.
        token_ids: int32 [n], as sampled.
        logprobs: float32 [n].
        history: What a request must begin with to continue this answer; opaque here.
        delivered: The client has it. Continuing an answer proves that it was delivered.
        reward: Of this turn.
        constrained: It was held to a constraint.
    """

    answer_id: str
    parent: Answer | None
    context: Int32Array
    token_ids: Int32Array
    logprobs: Float32Array
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    seconds: float
    history: object = None
    delivered: bool = False
    reward: float | None = None
    constrained: bool = False

    def path(self) -> list[Answer]:
        """From the conversation's first answer to this one."""
        answers: list[Answer] = []
        answer: Answer | None = self
        while answer is not None:
            answers.append(answer)
            answer = answer.parent
        return answers[::-1]

    def sequence(self) -> Int32Array:
        """int32: all ids up to this answer's last, as the engine saw and sampled them."""
        parts = [part for answer in self.path() for part in (answer.context, answer.token_ids)]
        return np.concatenate(parts)


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """All sequences of a conversation, one behind the other, as a `Trajectory` holds them.

    Attributes:
        token_ids: int32 [t].
        prompt_length: Of the first sequence.
        logprobs: float32 [t - prompt_length]; 0 where masked.
        loss_mask: bool [t - prompt_length].
        versions: Spans over t - prompt_length tokens; a masked token has the version of the answer
            that follows it.
        branch_starts: Where in token_ids each further sequence begins.
        turn_rewards: float32 [t - prompt_length]: a turn's reward at its last token, otherwise 0.
    """

    token_ids: Int32Array
    prompt_length: int
    logprobs: Float32Array
    loss_mask: BoolArray
    versions: tuple[VersionSpan, ...]
    branch_starts: tuple[int, ...]
    turn_rewards: Float32Array
    finish_reason: FinishReason
    seconds: float


@dataclass(slots=True)
class Conversation:
    """The answers of one session, in the order in which they were asked for."""

    answers: list[Answer] = field(default_factory=list)

    def add(self, answer: Answer) -> None:
        if answer.parent is not None:
            for earlier in answer.parent.path():
                earlier.delivered = True
        self.answers.append(answer)

    def find(self, answer_id: str) -> Answer:
        for answer in self.answers:
            if answer.answer_id == answer_id:
                return answer
        known = [answer.answer_id for answer in self.answers]
        raise DataError(f"turn = {answer_id!r}: no such answer in this session; it has {known}")

    def reward_turn(self, reward: float, answer_id: str | None = None) -> None:
        """Rates an answer, by default the last; a second rating is added to the first."""
        if not self.answers:
            raise DataError("reward: nothing was sampled in this session yet; ask the model first")
        answer = self.answers[-1] if answer_id is None else self.find(answer_id)
        answer.reward = reward if answer.reward is None else answer.reward + reward

    @property
    def delivered(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.delivered]

    @property
    def turn_reward(self) -> float:
        """The sum over delivered answers."""
        return float(sum(answer.reward or 0.0 for answer in self.delivered))

    def sampled(self) -> Sampled:
        """What is trained on.

        Raises:
            DataError: no answer was delivered.
        """
        answers = self.delivered
        if not answers:
            raise DataError("the session ended without an answer of the model; nothing to train on")
        branches = [list(_parts(branch)) for branch in _branches(answers)]
        parts = [part for branch in branches for part in branch]
        prompt_length = parts[0].token_ids.size

        def response(name: str) -> np.ndarray[Any, Any]:
            return np.concatenate([getattr(part, name) for part in parts])[prompt_length:]

        lengths = [sum(part.token_ids.size for part in branch) for branch in branches]
        return Sampled(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            prompt_length=prompt_length,
            logprobs=response("logprobs"),
            loss_mask=response("loss_mask"),
            versions=spans_of(response("versions")),
            branch_starts=tuple(int(start) for start in np.cumsum(lengths[:-1])),
            turn_rewards=response("rewards"),
            finish_reason=answers[-1].finish_reason,
            seconds=sum(answer.seconds for answer in answers),
        )


def _branches(answers: Sequence[Answer]) -> list[list[Answer]]:
    """Each answer in one branch: its parent's, if it is the first to continue it."""
    branches: list[list[Answer]] = []
    ends: dict[int, list[Answer]] = {}
    for answer in answers:
        branch = ends.pop(id(answer.parent), None) if answer.parent is not None else None
        if branch is None:
            branch = []
            branches.append(branch)
        branch.append(answer)
        ends[id(answer)] = branch
    return branches


class _Part(NamedTuple):
    """Consecutive ids of one provenance."""

    token_ids: Int32Array
    logprobs: Float32Array
    loss_mask: BoolArray
    versions: npt.NDArray[np.int64]
    rewards: Float32Array


def _parts(branch: Sequence[Answer]) -> Iterator[_Part]:
    for place, answer in enumerate(branch):
        context = answer.context
        if place == 0 and answer.parent is not None:
            context = np.concatenate([answer.parent.sequence(), context])
        versions = expand(answer.versions)
        masked = np.zeros(context.size, dtype=np.float32)
        yield _Part(
            context,
            masked,
            masked.astype(np.bool_),
            np.full(context.size, versions[0]),
            masked,
        )
        rewards = np.zeros(answer.token_ids.size, dtype=np.float32)
        rewards[-1] = answer.reward or 0.0
        own = np.full(answer.token_ids.size, not answer.constrained)
        logprobs = np.where(own, answer.logprobs, np.float32(0.0))
        yield _Part(answer.token_ids, logprobs, own, versions, rewards)
