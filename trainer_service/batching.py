"""Packing: from groups of trajectories to the micro-batches of one optimizer step.

Pure and deterministic; numpy only. A micro-batch is one row of tokens without padding, made of
segments: a segment attends causally to itself and, wholly, to the segment it continues. A prompt
that several trajectories of a group share is one segment that all of them continue, so that it is
computed once; any other trajectory is one segment.

What must hold:
- Only trajectories that can move the weights are packed: at least one trained token, and an
  advantage other than exactly 0 (the loss has no other term). Nothing is computed behind a
  trajectory's last trained token.
- A trajectory is never split over micro-batches, so that sequence-level quantities can be computed.
- Every token carries its weight in the aggregated loss, counted over the whole step. How the step
  is split into micro-batches therefore cannot matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from leeway.errors import ConfigError, DataError
from leeway.trajectory import Group, Sampling, Trajectory

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

ROOT = -1
"""Parent of a segment that continues no other."""


class Segment(NamedTuple):
    """Consecutive tokens of a micro-batch, and the index of the segment that they continue."""

    start: int
    length: int
    parent: int = ROOT


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """One micro-batch: T packed tokens, of which n predictions are trained.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T]; a segment's go on from its parent's.
        segments: They cover the T tokens in order; a parent comes before its children.
        rows: int64 [n], where in the T tokens the hidden state lies that predicts each trained
            token.
        targets: int64 [n], the trained tokens.
        temperatures: float32 [n], at which they were sampled.
        behaviour: float32 [n], log-probabilities under the policy that generated them.
        advantages: float32 [n].
        weights: float32 [n], of each token's loss in the aggregated loss of the whole step.
        versions: int64 [n], the policy version that generated each.
        sequences: int64 [n], the trajectory's index in the step.
        proximal: float32 [n], log-probabilities at the start of the batch. None when the batch is
            one optimizer step: the forward pass of that very step then yields them.
    """

    token_ids: Int64Array
    positions: Int64Array
    segments: tuple[Segment, ...]
    rows: Int64Array
    targets: Int64Array
    temperatures: Float32Array
    behaviour: Float32Array
    advantages: Float32Array
    weights: Float32Array
    versions: Int64Array
    sequences: Int64Array
    proximal: Float32Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The micro-batches of one optimizer step, and what went into them.

    Attributes:
        microbatches: Empty when no trajectory can move the weights.
        trajectories: All that have a trained token.
        trained_tokens: All trained tokens, those of unpacked trajectories included.
        packed_trajectories: Those that are computed.
        packed_tokens: Tokens in all forward passes.
        sequence_tokens: Prompt and response tokens of all trajectories, each counted by itself.
    """

    microbatches: tuple[PackedBatch, ...]
    trajectories: int
    trained_tokens: int
    packed_trajectories: int
    packed_tokens: int
    sequence_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    """A trajectory to be packed."""

    trajectory: Trajectory
    sequence: int
    advantage: float
    weight: float
    trained: npt.NDArray[np.intp]

    @property
    def continuation(self) -> int:
        """Response tokens to compute: those before the last trained one."""
        return int(self.trained[-1])


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """Trajectories that share one prompt and stay together."""

    members: tuple[_Member, ...]

    @property
    def prompt_length(self) -> int:
        return self.members[0].trajectory.prompt_length

    @property
    def tokens(self) -> int:
        return self.prompt_length + sum(member.continuation for member in self.members)


def pack(
    groups: Sequence[Group],
    advantages: Float64Array,
    weights: Float64Array,
    microbatch_tokens: int,
) -> StepPlan:
    """Packs the groups of one optimizer step.

    Args:
        groups: In the order in which `advantages` and `weights` list their trajectories.
        advantages: float64 [trajectories].
        weights: float64 [trajectories], of each of a trajectory's tokens in the aggregated loss.
        microbatch_tokens: Most tokens in a micro-batch. A single trajectory that is longer is
            packed alone.

    Raises:
        DataError: The arrays do not list the groups' trajectories, or hold NaN or infinity.
        ConfigError: A trajectory was sampled in a way whose log-probabilities the trainer cannot
            compute (see `check_sampling`).
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for name, values in (("advantages", advantages), ("weights", weights)):
        if values.shape != (len(trajectories),) or not np.isfinite(values).all():
            raise DataError(
                f"{name} = {values.dtype}{list(values.shape)}: give one finite number for each of "
                f"the {len(trajectories)} trajectories"
            )
    units: list[_Unit] = []
    sequence = 0
    for group in groups:
        members = []
        for trajectory in group.trajectories:
            trained = np.flatnonzero(trajectory.loss_mask)
            if trained.size and advantages[sequence] != 0.0:
                check_sampling(trajectory.sampling)
                members.append(
                    _Member(
                        trajectory,
                        sequence,
                        float(advantages[sequence]),
                        float(weights[sequence]),
                        trained,
                    )
                )
            sequence += 1
        units.extend(_units(members, microbatch_tokens))
    lengths = [trajectory.trained_tokens for trajectory in trajectories]
    microbatches = tuple(_microbatch(bin_) for bin_ in _bins(units, microbatch_tokens))
    return StepPlan(
        microbatches=microbatches,
        trajectories=sum(length > 0 for length in lengths),
        trained_tokens=sum(lengths),
        packed_trajectories=sum(len(unit.members) for unit in units),
        packed_tokens=sum(unit.tokens for unit in units),
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
    """Members with equal prompts together, as many as the budget allows, in order."""
    by_prompt: dict[bytes, list[_Member]] = {}
    for member in members:
        trajectory = member.trajectory
        prompt = trajectory.token_ids[: trajectory.prompt_length].tobytes()
        by_prompt.setdefault(prompt, []).append(member)
    for sharing in by_prompt.values():
        unit: list[_Member] = []
        for member in sharing:
            if unit and _Unit((*unit, member)).tokens > budget:
                yield _Unit(tuple(unit))
                unit = []
            unit.append(member)
        yield _Unit(tuple(unit))


def _bins(units: Sequence[_Unit], budget: int) -> list[list[_Unit]]:
    """First fit, largest first; bins, and units in a bin, in the order of the step."""
    bins: list[tuple[int, list[int]]] = []
    for index in sorted(range(len(units)), key=lambda i: (-units[i].tokens, i)):
        tokens = units[index].tokens
        for place, (filled, held) in enumerate(bins):
            if filled + tokens <= budget:
                bins[place] = (filled + tokens, [*held, index])
                break
        else:
            bins.append((tokens, [index]))
    ordered = sorted(sorted(held) for _, held in bins)
    return [[units[index] for index in held] for held in ordered]


def _microbatch(units: Sequence[_Unit]) -> PackedBatch:
    token_ids: list[npt.NDArray[np.int32]] = []
    positions: list[Int64Array] = []
    segments: list[Segment] = []
    rows: list[Int64Array] = []
    members: list[_Member] = []
    size = 0

    def append(tokens: npt.NDArray[np.int32], position: int, parent: int) -> int:
        nonlocal size
        segments.append(Segment(size, tokens.size, parent))
        token_ids.append(tokens)
        positions.append(np.arange(position, position + tokens.size, dtype=np.int64))
        size += tokens.size
        return len(segments) - 1

    for unit in units:
        prompt_length = unit.prompt_length
        members.extend(unit.members)
        start = size
        if len(unit.members) == 1:
            (member,) = unit.members
            append(member.trajectory.token_ids[: unit.tokens], 0, ROOT)
            rows.append(start + prompt_length - 1 + member.trained)
            continue
        prompt = append(unit.members[0].trajectory.token_ids[:prompt_length], 0, ROOT)
        for member in unit.members:
            answer = size
            if member.continuation:
                end = prompt_length + member.continuation
                tokens = member.trajectory.token_ids[prompt_length:end]
                append(tokens, prompt_length, prompt)
            rows.append(
                np.where(
                    member.trained == 0, start + prompt_length - 1, answer + member.trained - 1
                )
            )

    counts = [member.trained.size for member in members]

    def spread(values: Sequence[float]) -> Float32Array:
        return np.repeat(np.array(values, dtype=np.float32), counts)

    return PackedBatch(
        token_ids=np.concatenate(token_ids).astype(np.int64),
        positions=np.concatenate(positions),
        segments=tuple(segments),
        rows=np.concatenate(rows).astype(np.int64),
        targets=np.concatenate(
            [m.trajectory.token_ids[m.trajectory.prompt_length + m.trained] for m in members]
        ).astype(np.int64),
        temperatures=spread([m.trajectory.sampling.temperature for m in members]),
        behaviour=np.concatenate([m.trajectory.logprobs[m.trained] for m in members]),
        advantages=spread([m.advantage for m in members]),
        weights=spread([m.weight for m in members]),
        versions=np.concatenate([m.trajectory.token_versions()[m.trained] for m in members]),
        sequences=np.repeat(np.array([m.sequence for m in members], dtype=np.int64), counts),
    )
