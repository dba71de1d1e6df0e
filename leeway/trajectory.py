"""The domain types of a rollout, their validation, and their form on the wire.

A `Trajectory` is what one rollout left behind; a `Group` is all trajectories of one `Task`. They
are validated once, when built: whoever holds one may rely on its lengths, ranges and versions.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from leeway.arrays import array_from_wire, array_to_wire
from leeway.errors import DataError, WireError
from leeway.v1 import trajectory_pb2 as pb
from leeway.versions import VersionSpan, expand

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

# Other systems mark a missing log-probability by a sentinel such as -9999. No sampled token is that
# unlikely: at -1000 a float64 probability has long been zero.
LOWEST_LOGPROB = -1000.0
# A log-softmax in float32 may end a little above 0.
HIGHEST_LOGPROB = 1e-3

NO_EXTRAS: Mapping[str, npt.NDArray[Any]] = MappingProxyType({})
NO_PARTS: Mapping[str, float] = MappingProxyType({})


class FinishReason(IntEnum):
    """Why a generation ended."""

    UNFINISHED = pb.FINISH_REASON_UNSPECIFIED
    STOP = pb.FINISH_REASON_STOP
    LENGTH = pb.FINISH_REASON_LENGTH


class Purpose(IntEnum):
    """What a task's trajectories are for."""

    TRAIN = pb.PURPOSE_TRAIN
    EVAL = pb.PURPOSE_EVAL


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    Behaviour log-probabilities are those of the distribution that was sampled from: after
    `temperature`, and over the support that `top_p` and `top_k` leave. Temperature 0 is greedy.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        _require(
            0.0 <= self.temperature <= 100.0,
            "sampling.temperature",
            self.temperature,
            "use a number from 0 (greedy) to 100",
        )
        _require(0.0 < self.top_p <= 1.0, "sampling.top_p", self.top_p, "use a number in (0, 1]")
        _require(self.top_k >= 0, "sampling.top_k", self.top_k, "use 0 for the whole vocabulary")
        _require(
            self.max_new_tokens >= 1,
            "sampling.max_new_tokens",
            self.max_new_tokens,
            "ask for at least one token",
        )


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt, to be rolled out `group_size` times.

    Attributes:
        task_id: Unique in a run, and a function of `sequence`: enqueueing it twice adds it once.
        sequence: Position in the sampler's order; batches are ordered by it.
        messages: Chat messages, each {"role": ..., "content": ...}.
        columns: The data row's other columns; they reach the reward function by name.
        seed: Seeds the group's samples, whichever node draws them.
        min_version: The oldest version it may be generated with; an evaluation names the policy
            that it judges.
    """

    task_id: str
    sequence: int
    messages: tuple[Mapping[str, Any], ...]
    columns: Mapping[str, Any]
    group_size: int
    sampling: Sampling
    seed: int
    purpose: Purpose = Purpose.TRAIN
    min_version: int = 0

    def __post_init__(self) -> None:
        _require(bool(self.task_id), "task_id", self.task_id, "give every task an id")
        _require(self.group_size >= 1, "group_size", self.group_size, "sample at least once")
        _require(len(self.messages) > 0, "messages", self.messages, "give at least one message")

    def to_wire(self) -> pb.Task:
        message = pb.Task(
            task_id=self.task_id,
            sequence=self.sequence,
            purpose=self.purpose.value,
            group_size=self.group_size,
            messages_json=json.dumps([dict(message) for message in self.messages]),
            columns_json=json.dumps(dict(self.columns)),
            seed=self.seed,
            min_version=self.min_version,
        )
        _sampling_to_wire(self.sampling, message.sampling)
        return message

    @classmethod
    def from_wire(cls, message: pb.Task) -> Task:
        """Raises `WireError` naming the field when the message is not a valid task."""
        try:
            messages = tuple(json.loads(message.messages_json))
            columns = json.loads(message.columns_json or "{}")
        except ValueError as error:
            raise WireError(f"task {message.task_id!r}: not JSON: {error}") from error
        try:
            return cls(
                task_id=message.task_id,
                sequence=message.sequence,
                messages=messages,
                columns=columns,
                group_size=message.group_size,
                sampling=_sampling_from_wire(message.sampling),
                seed=message.seed,
                purpose=Purpose(message.purpose),
                min_version=message.min_version,
            )
        except (DataError, ValueError) as error:
            raise WireError(f"task {message.task_id!r}: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One rollout.

    The response is everything after the prompt: sampled tokens, and tokens of tools or users in
    between, which the loss mask excludes.

    Attributes:
        index: Which sample of its group this is, from 0.
        token_ids: int32 [prompt + response].
        logprobs: float32 [response], behaviour log-probabilities; 0 where the loss mask is 0.
        loss_mask: bool [response], true where a token was sampled and may be trained.
        versions: Spans whose lengths add up to the response's.
        reward: What is learned from; None on a partial generation.
        score: What the reward function said before shaping; filters look at this.
        reward_parts: What else was measured of it, by name.
        branch_starts: Where in token_ids the conversation begins anew, if it does: each part is a
            sequence of its own, which attends to nothing before it.
        generation_seconds: From the request for the first token to the last token.
    """

    trajectory_id: str
    task_id: str
    index: int
    token_ids: Int32Array
    prompt_length: int
    logprobs: Float32Array
    loss_mask: BoolArray
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    sampling: Sampling
    reward: float | None = None
    score: float | None = None
    node_id: str = ""
    generation_seconds: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=lambda: NO_PARTS)
    branch_starts: tuple[int, ...] = ()
    extras: Mapping[str, npt.NDArray[Any]] = field(default_factory=lambda: NO_EXTRAS)

    def __post_init__(self) -> None:
        # Every trajectory is built at least three times on its way: messages are made on a fault.
        if not self.trajectory_id:
            raise _fault("trajectory_id", self.trajectory_id, "give it an id")
        if not self.task_id:
            raise _fault("task_id", self.task_id, "name the task it belongs to")
        tokens, logprobs, mask = self.token_ids, self.logprobs, self.loss_mask
        if tokens.dtype != np.int32 or tokens.ndim != 1:
            raise _fault("token_ids", _form(tokens), "send int32 [tokens]")
        if not 1 <= self.prompt_length <= tokens.size:
            remedy = f"it must be from 1 to {tokens.size} (token_ids)"
            raise _fault("prompt_length", self.prompt_length, remedy)
        length = tokens.size - self.prompt_length
        if logprobs.dtype != np.float32 or logprobs.shape != (length,):
            remedy = f"send float32 [{length}], one for each response token"
            raise _fault("logprobs", _form(logprobs), remedy)
        if mask.dtype != np.bool_ or mask.shape != (length,):
            remedy = f"send one flag for each of the {length} response tokens"
            raise _fault("loss_mask", _form(mask), remedy)
        lengths = [span.length for span in self.versions]
        if sum(lengths) != length or min(lengths, default=1) < 1:
            remedy = f"span lengths must be positive and add up to {length}"
            raise _fault("versions", list(self.versions), remedy)
        if (lowest_id := tokens.min()) < 0:
            raise _fault("token_ids", int(lowest_id), "token ids are never negative")
        # NaN fails every comparison.
        lowest, highest = logprobs.min(initial=0.0), logprobs.max(initial=0.0)
        if not (lowest > LOWEST_LOGPROB and highest <= HIGHEST_LOGPROB):
            raise self._logprobs_fault()
        for name, value in (("reward", self.reward), ("score", self.score)):
            if value is not None and not math.isfinite(value):
                raise _fault(name, value, "it must be finite")
        if self.reward_parts and not all(map(math.isfinite, self.reward_parts.values())):
            raise _fault("reward_parts", dict(self.reward_parts), "all must be finite")
        if self.branch_starts:
            self._check_branches()

    def _check_branches(self) -> None:
        first, end = self.prompt_length, self.token_ids.size
        if any(one >= other for one, other in pairwise((first, *self.branch_starts, end))):
            remedy = f"they ascend from {first} (prompt_length) to {end} (token_ids)"
            raise _fault("branch_starts", list(self.branch_starts), remedy)
        if any(self.loss_mask[start - first] for start in self.branch_starts):
            remedy = "nothing predicts a sequence's first token, so that it cannot be trained"
            raise _fault("branch_starts", list(self.branch_starts), remedy)

    def _logprobs_fault(self) -> DataError:
        if not np.isfinite(self.logprobs).all():
            return _fault(
                "logprobs",
                "NaN or infinite",
                "behaviour log-probabilities must be finite; the engine did not return them all",
            )
        return _fault(
            "logprobs",
            f"min {self.logprobs.min()}, max {self.logprobs.max()}",
            f"log-probabilities lie in ({LOWEST_LOGPROB:g}, 0]; a sentinel is not one",
        )

    @property
    def response_length(self) -> int:
        return self.token_ids.size - self.prompt_length

    @property
    def trained_tokens(self) -> int:
        """How many tokens may enter the loss."""
        return int(self.loss_mask.sum())

    def branches(self) -> Iterator[slice]:
        """The parts of token_ids that are sequences of their own, in order."""
        for start, end in pairwise((0, *self.branch_starts, self.token_ids.size)):
            yield slice(start, end)

    def token_versions(self) -> npt.NDArray[np.int64]:
        """int64 [response]: the version that generated each token."""
        return expand(self.versions)

    def version_range(self) -> tuple[int, int] | None:
        """Oldest and newest version over the trainable tokens; None when there are none."""
        trainable, start = [], 0
        for version, length in self.versions:
            if self.loss_mask[start : start + length].any():
                trainable.append(version)
            start += length
        return (min(trainable), max(trainable)) if trainable else None

    def scored(self, score: float, reward: float | None = None) -> Trajectory:
        """This trajectory with its score, and what is learned from if that was shaped."""
        return replace(self, score=score, reward=score if reward is None else reward)

    def masked_below(self, version: int) -> Trajectory:
        """This trajectory with tokens that older versions generated taken out of the loss."""
        keep = self.loss_mask & (self.token_versions() >= version)
        logprobs = np.where(keep, self.logprobs, np.float32(0.0))
        return replace(self, loss_mask=keep, logprobs=logprobs)

    def to_wire(self) -> pb.Trajectory:
        message = pb.Trajectory(
            trajectory_id=self.trajectory_id,
            task_id=self.task_id,
            index=self.index,
            prompt_length=self.prompt_length,
            finish_reason=self.finish_reason.value,
            reward=self.reward,
            score=self.score,
            node_id=self.node_id,
            generation_seconds=self.generation_seconds,
            branch_starts=self.branch_starts,
        )
        array_to_wire(self.token_ids, message.token_ids)
        array_to_wire(self.logprobs, message.logprobs)
        array_to_wire(self.loss_mask.view(np.uint8), message.loss_mask)
        _sampling_to_wire(self.sampling, message.sampling)
        for version, length in self.versions:
            message.versions.add(version=version, length=length)
        if self.reward_parts:
            message.reward_parts.update(self.reward_parts)
        for name, array in self.extras.items():
            array_to_wire(array, message.extras[name])
        return message

    @classmethod
    def from_wire(cls, message: pb.Trajectory) -> Trajectory:
        """Raises `WireError` naming the field when the message is not a valid trajectory."""
        try:
            return cls(
                trajectory_id=message.trajectory_id,
                task_id=message.task_id,
                index=message.index,
                token_ids=array_from_wire(message.token_ids, "token_ids"),
                prompt_length=message.prompt_length,
                logprobs=array_from_wire(message.logprobs, "logprobs"),
                loss_mask=array_from_wire(message.loss_mask, "loss_mask").astype(np.bool_),
                versions=tuple([VersionSpan(s.version, s.length) for s in message.versions]),
                finish_reason=FinishReason(message.finish_reason),
                sampling=_sampling_from_wire(message.sampling),
                reward=message.reward if message.HasField("reward") else None,
                score=message.score if message.HasField("score") else None,
                node_id=message.node_id,
                generation_seconds=message.generation_seconds,
                branch_starts=tuple(message.branch_starts),
                reward_parts=MappingProxyType(dict(message.reward_parts))
                if message.reward_parts
                else NO_PARTS,
                extras=MappingProxyType(
                    {name: array_from_wire(array, name) for name, array in message.extras.items()}
                )
                if message.extras
                else NO_EXTRAS,
            )
        except (DataError, ValueError) as error:
            raise WireError(f"trajectory {message.trajectory_id!r}: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The trajectories of one task, ordered by index."""

    task: Task
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        indices = [trajectory.index for trajectory in self.trajectories]
        _require(
            indices == sorted(set(indices)),
            "trajectories",
            indices,
            "each sample of a group appears once, in order of its index",
        )
        strangers = [t.task_id for t in self.trajectories if t.task_id != self.task.task_id]
        _require(
            not strangers,
            "trajectories",
            strangers,
            f"all must belong to task {self.task.task_id!r}",
        )

    def to_wire(self) -> pb.Group:
        return pb.Group(
            task=self.task.to_wire(),
            trajectories=[trajectory.to_wire() for trajectory in self.trajectories],
        )

    @classmethod
    def from_wire(cls, message: pb.Group) -> Group:
        """Raises `WireError` naming the field when the message is not a valid group."""
        trajectories = (Trajectory.from_wire(trajectory) for trajectory in message.trajectories)
        ordered = tuple(sorted(trajectories, key=lambda trajectory: trajectory.index))
        try:
            return cls(Task.from_wire(message.task), ordered)
        except DataError as error:
            raise WireError(f"group of task {message.task.task_id!r}: {error}") from error


def _sampling_to_wire(sampling: Sampling, message: pb.Sampling) -> None:
    message.temperature = sampling.temperature
    message.top_p = sampling.top_p
    message.top_k = sampling.top_k
    message.max_new_tokens = sampling.max_new_tokens


def _sampling_from_wire(message: pb.Sampling) -> Sampling:
    return _sampling(message.temperature, message.top_p, message.top_k, message.max_new_tokens)


@functools.lru_cache
def _sampling(temperature: float, top_p: float, top_k: int, max_new_tokens: int) -> Sampling:
    """A run draws in few ways, and names one in every trajectory."""
    return Sampling(temperature, top_p, top_k, max_new_tokens)


def _require(condition: bool, name: str, value: object, remedy: str) -> None:
    if not condition:
        raise _fault(name, value, remedy)


def _fault(name: str, value: object, remedy: str) -> DataError:
    return DataError(f"{name} = {value!r}: {remedy}")


def _form(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"
