"""Packing: from groups of trajectories to the micro-batches of one optimizer step.

Pure and deterministic; numpy only. A micro-batch is one row of tokens without padding, made of
segments: a segment attends causally to itself and, wholly, to the segments it continues. The
segments are a prefix tree of the micro-batch's trajectories: what several of them begin with (a
group's prompt, a system prompt that all groups have, equal answers) is computed once.

What must hold:
- Only trajectories that can move the weights are packed: at least one trained token, and a weight
  other than 0. Nothing is computed behind a trajectory's last trained token.
- A trajectory is never split over micro-batches, so that sequence-level quantities can be computed.
  Where its conversation begins anew, each branch is a sequence of the tree by itself.
- Every token carries its weight in the aggregated loss, counted over the whole step. How the step
  is split into micro-batches therefore cannot matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from leeway.errors import ConfigError, DataError
from leeway.trajectory import Group, Sampling, Trajectory
from trainer_service.balance import ONE_RANK, Size, Spread, bins
from trainer_service.packed import (
    ROOT,
    Float32Array,
    Float64Array,
    Int64Array,
    PackedBatch,
    Segment,
    StepPlan,
)

SHARED_TOKENS = 8
"""A common beginning becomes a segment of its own when that saves so many tokens: attention is then
called once more in every layer, which costs a small model as much as one or two tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    """A sequence to be packed: a trajectory, or one of its branches.

    Attributes:
        start: Of the branch, in the trajectory's tokens.
        trained: Of its tokens in the response.
    """

    trajectory: Trajectory
    sequence: int
    advantages: Float32Array
    weight: float
    start: int
    trained: npt.NDArray[np.intp]

    @property
    def continuation(self) -> int:
        """Tokens to compute behind the trajectory's prompt, with which only its first branch is
        sure to begin."""
        return self.inputs.size - (0 if self.start else self.trajectory.prompt_length)

    @property
    def inputs(self) -> npt.NDArray[np.int32]:
        """The tokens to compute: those before the last trained one."""
        end = self.trajectory.prompt_length + int(self.trained[-1])
        return self.trajectory.token_ids[self.start : end]

    @property
    def rows(self) -> npt.NDArray[np.intp]:
        """Where in `inputs` the trained tokens are predicted."""
        return self.trajectory.prompt_length - 1 - self.start + self.trained


def _branches(
    trajectory: Trajectory, sequence: int, advantages: Float32Array, weight: float
) -> Iterator[_Member]:
    """Those with a trained token."""
    trained = np.flatnonzero(trajectory.loss_mask)
    places = trajectory.prompt_length + trained
    for branch in trajectory.branches():
        own = (branch.start <= places) & (places < branch.stop)
        if own.any():
            yield _Member(trajectory, sequence, advantages[own], weight, branch.start, trained[own])


def listed(trajectory: Trajectory) -> npt.NDArray[np.intp]:
    """int [trained]: the places in the response of its trained tokens, in a micro-batch's order."""
    scores = np.zeros(trajectory.trained_tokens, dtype=np.float32)
    branches = sorted(_branches(trajectory, 0, scores, 1.0), key=_order)
    return np.concatenate([branch.trained for branch in branches])


def by_trajectory(
    trajectories: Sequence[Trajectory],
    batches: Sequence[PackedBatch],
    scores: Sequence[Float32Array],
) -> list[Float64Array]:
    """For each trajectory float64 [trained], in the response's order.

    Args:
        batches: Of a step in which all trajectories are packed.
        scores: For each micro-batch float32 [n].
    """
    found = [np.zeros(trajectory.trained_tokens) for trajectory in trajectories]
    for batch, own in zip(batches, scores, strict=True):
        for sequence in np.unique(batch.sequences):
            places = _packed_places(trajectories[sequence])
            found[sequence][places] = own[batch.sequences == sequence]
    return found


def by_token(
    trajectories: Sequence[Trajectory], batch: PackedBatch, values: Sequence[Float64Array]
) -> Float32Array:
    """float32 [n]: the inverse of `by_trajectory`, for one micro-batch."""
    found = np.zeros(batch.targets.size, dtype=np.float32)
    for sequence in np.unique(batch.sequences):
        places = _packed_places(trajectories[sequence])
        found[batch.sequences == sequence] = values[sequence][places]
    return found


def _packed_places(trajectory: Trajectory) -> npt.NDArray[np.intp]:
    """int [trained]: which of the response's trained tokens comes at each place of a batch."""
    return np.searchsorted(np.flatnonzero(trajectory.loss_mask), listed(trajectory))


def _order(member: _Member) -> tuple[bytes, int]:
    """Big-endian bytes sort as the tokens do, and a beginning before what continues it."""
    return member.inputs.astype(">i4").tobytes(), member.sequence


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """Trajectories that share one prompt and stay together."""

    members: tuple[_Member, ...]

    @property
    def tokens(self) -> int:
        """What the unit takes at most: a prompt too short to be worth sharing is repeated."""
        prompt = self.members[0].trajectory.prompt_length
        repeated = min((len(self.members) - 1) * prompt, SHARED_TOKENS - 1)
        return prompt + repeated + sum(member.continuation for member in self.members)

    @property
    def size(self) -> Size:
        prompt = self.members[0].trajectory.prompt_length
        answers = [member.continuation for member in self.members]
        pairs = prompt * prompt // 2 + sum(n * prompt + n * n // 2 for n in answers)
        return Size(self.tokens, pairs)


def pack(
    groups: Sequence[Group],
    advantages: Sequence[float | Float64Array] | Float64Array,
    weights: Float64Array,
    microbatch_tokens: int,
    spread: Spread = ONE_RANK,
    *,
    whole_groups: bool = False,
) -> StepPlan:
    """Packs the groups of one optimizer step.

    Args:
        groups: In the order in which `advantages` and `weights` list their trajectories.
        advantages: For each trajectory one number, or one for each of its trained tokens.
        weights: float64 [trajectories], of each of a trajectory's tokens in the aggregated loss;
            trajectories of weight 0 are counted, not packed.
        microbatch_tokens: Most tokens in a micro-batch. A single trajectory that is longer is
            packed alone.
        spread: The backend's.
        whole_groups: A group stays in one micro-batch too, even where that is longer.

    Raises:
        DataError: The arrays do not list the groups' trajectories, or hold NaN or infinity.
        ConfigError: A trajectory was sampled in a way whose log-probabilities the trainer cannot
            compute (see `check_sampling`).
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for name, values in (("advantages", advantages), ("weights", weights)):
        if len(values) != len(trajectories) or not all(np.isfinite(v).all() for v in values):
            raise DataError(
                f"{name} [{len(values)}]: give finite numbers for each of the {len(trajectories)} "
                "trajectories"
            )
    members: list[list[_Member]] = []
    sequence = 0
    for group in groups:
        members.append([])
        for trajectory in group.trajectories:
            trained = trajectory.trained_tokens
            if trained and weights[sequence] != 0.0:
                check_sampling(trajectory.sampling)
                own = np.broadcast_to(np.float32(advantages[sequence]), trained)
                weight = float(weights[sequence])
                members[-1].extend(_branches(trajectory, sequence, own, weight))
            sequence += 1
    if whole_groups:
        units = [_Unit(tuple(own)) for own in members if own]
    else:
        # No unit is more than a rank's share.
        limit = microbatch_tokens
        if spread.ranks > 1:
            share = sum(_Unit(tuple(own)).tokens for own in members if own) // spread.ranks
            limit = min(limit, max(1, share))
        units = [unit for own in members for unit in _units(own, limit)]
    held = bins([unit.size for unit in units], microbatch_tokens, spread)
    lengths = [trajectory.trained_tokens for trajectory in trajectories]
    microbatches = tuple(_microbatch([units[index] for index in own]) for own in held)
    return StepPlan(
        microbatches=microbatches,
        trajectories=sum(length > 0 for length in lengths),
        trained_tokens=sum(lengths),
        packed_trajectories=len({m.sequence for unit in units for m in unit.members}),
        packed_tokens=sum(batch.token_ids.size for batch in microbatches),
        sequence_tokens=sum(trajectory.token_ids.size for trajectory in trajectories),
    )


def check_sampling(sampling: Sampling) -> None:
    """Refuses what would make the importance ratio wrong.

    Raises:
        ConfigError: naming the setting, its value and the remedy.
    """
    if sampling.temperature == 0.0:
        raise ConfigError(
            "sampling.temperature = 0: greedy tokens have no behaviour log-probability; sample "
            "with a temperature above 0, e.g. 1.0"
        )
    if sampling.top_p < 1.0 or sampling.top_k > 0:
        raise ConfigError(
            f"sampling.top_p = {sampling.top_p}, sampling.top_k = {sampling.top_k}: behaviour "
            "log-probabilities are then over the tokens that the generating policy's cut-off left, "
            "which the trainer cannot know, so that every importance ratio would be wrong; use "
            "sampling.top_p=1.0 and sampling.top_k=0"
        )


def _units(members: Sequence[_Member], budget: int) -> Iterator[_Unit]:
    """Trajectories with equal prompts together, as many as the budget allows, in order."""
    by_prompt: dict[bytes, list[list[_Member]]] = {}
    for _, own in groupby(members, key=lambda member: member.sequence):
        branches = list(own)
        trajectory = branches[0].trajectory
        prompt = trajectory.token_ids[: trajectory.prompt_length].tobytes()
        by_prompt.setdefault(prompt, []).append(branches)
    for sharing in by_prompt.values():
        unit: list[_Member] = []
        for branches in sharing:
            if unit and _Unit((*unit, *branches)).tokens > budget:
                yield _Unit(tuple(unit))
                unit = []
            unit.extend(branches)
        yield _Unit(tuple(unit))


class _PrefixTree:
    """Segments of trajectories that are added as a sorted whole."""

    def __init__(self, members: Sequence[_Member]) -> None:
        self.members = sorted(members, key=_order)
        self.segments: list[Segment] = []
        self.token_ids: list[npt.NDArray[np.int32]] = []
        self.positions: list[Int64Array] = []
        self.rows: list[Int64Array] = []
        """For each member, where each of its inputs lies."""
        self._size = 0
        self._add(self.members, ROOT, np.empty(0, dtype=np.int64))

    def _add(self, members: Sequence[_Member], parent: int, path: Int64Array) -> None:
        """Adds what the members have behind `path`, the places of their common beginning so far."""
        first, last = members[0].inputs, members[-1].inputs
        common = _common_length(first, last)
        saved = (len(members) - 1) * (common - path.size)
        ends = common == last.size
        if common > path.size and (ends or saved >= SHARED_TOKENS):
            parent, path = self._append(first[:common], parent, path)
        if ends:
            self.rows.extend([path] * len(members))
            return
        for part in _split_by_token(members, common):
            self._add(part, parent, path)

    def _append(
        self, inputs: npt.NDArray[np.int32], parent: int, path: Int64Array
    ) -> tuple[int, Int64Array]:
        """A segment of the inputs behind `path`: its index, and the places of all inputs."""
        places = np.arange(self._size, self._size + inputs.size - path.size, dtype=np.int64)
        self.segments.append(Segment(self._size, places.size, parent))
        self.token_ids.append(inputs[path.size :])
        self.positions.append(np.arange(path.size, inputs.size, dtype=np.int64))
        self._size += places.size
        return len(self.segments) - 1, np.concatenate([path, places])


def _common_length(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    length = min(one.size, other.size)
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if different.size else length


def _split_by_token(members: Sequence[_Member], place: int) -> Iterator[Sequence[_Member]]:
    """Runs of sorted members with equal tokens at `place`; those that end before it come first."""
    tokens = [m.inputs[place] if m.inputs.size > place else -1 for m in members]
    start = 0
    for end in range(1, len(members) + 1):
        if end == len(members) or tokens[end] != tokens[start]:
            yield members[start:end]
            start = end


def _microbatch(units: Sequence[_Unit]) -> PackedBatch:
    tree = _PrefixTree([member for unit in units for member in unit.members])
    members = tree.members
    counts = [member.trained.size for member in members]

    def spread(values: Sequence[float]) -> Float32Array:
        return np.repeat(np.array(values, dtype=np.float32), counts)

    places = np.concatenate([rows[m.rows] for m, rows in zip(members, tree.rows, strict=True)])
    temperatures = spread([m.trajectory.sampling.temperature for m in members])
    (rows, bits), predictions = np.unique(
        np.stack([places, temperatures.view(np.int32).astype(np.int64)]),
        axis=1,
        return_inverse=True,
    )
    return PackedBatch(
        token_ids=np.concatenate(tree.token_ids).astype(np.int64),
        positions=np.concatenate(tree.positions),
        segments=tuple(tree.segments),
        rows=rows,
        temperatures=bits.astype(np.int32).view(np.float32),
        predictions=predictions.astype(np.int64),
        targets=np.concatenate(
            [m.trajectory.token_ids[m.trajectory.prompt_length + m.trained] for m in members]
        ).astype(np.int64),
        behaviour=np.concatenate([m.trajectory.logprobs[m.trained] for m in members]),
        advantages=np.concatenate([m.advantages for m in members]),
        weights=spread([m.weight for m in members]),
        versions=np.concatenate([m.trajectory.token_versions()[m.trained] for m in members]),
        sequences=np.repeat(np.array([m.sequence for m in members], dtype=np.int64), counts),
    )
