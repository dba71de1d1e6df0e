"""Advantages: from rewards to one number a turn, then a token.

Pure functions on numpy arrays. A turn is one sampled answer of a conversation; most trajectories
have one. What must hold: trajectories are compared within their own group only, at the group's true
size, whatever was lost on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from leeway.algorithm import AdvantageConfig, Baseline, Normalise
from leeway.errors import DataError

Float64Array = npt.NDArray[np.float64]

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as DeepSeekMath's implementations do."""
VARIANCE_EPSILON = 1e-8
"""Added to a batch's variance, as implementations of whitening do."""


def group_relative(
    rewards: Sequence[npt.ArrayLike], groups: npt.ArrayLike, config: AdvantageConfig
) -> list[Float64Array]:
    """One advantage for each turn of each trajectory; `whiten` follows where `normalise` = batch.

    A turn's return is its reward plus `turn_discount` times the next turn's return. Its advantage
    is the return minus the baseline, divided by std + 1e-6 (unbiased, n - 1) of the group's returns
    when normalise = group:

    - group, group: GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.2)
    - group, none: Dr. GRPO (arXiv:2503.20783, section 3.2)
    - leave_one_out, none: RLOO (arXiv:2402.14740, section 3.2); the mean of the other trajectories
    - none, batch: REINFORCE++; group, batch: its baseline form (arXiv:2501.03262)

    In a group of equal returns every advantage relative to it is exactly 0.

    Args:
        rewards: For each trajectory float [turns]; one turn holds the whole reward.
        groups: int [trajectories], equal numbers for trajectories of one task.

    Raises:
        DataError: A reward is NaN or infinite, the lengths differ, or a group has one member: its
            reward would vanish.
    """
    own = [np.asarray(r, dtype=np.float64).reshape(-1) for r in rewards]
    ids = np.asarray(groups, dtype=np.int64)
    if ids.shape != (len(own),):
        raise DataError(f"{len(own)} rewards, groups {list(ids.shape)}: give one of each, [n]")
    for values in own:
        if not values.size or not np.isfinite(values).all():
            raise DataError(f"rewards = {values.tolist()}: every reward must be finite")
    returns = [_returns(values, config.turn_discount) for values in own]
    advantages = returns
    if config.baseline is not Baseline.NONE:
        advantages = [np.zeros_like(values) for values in returns]
        for group in np.unique(ids):
            members = np.flatnonzero(ids == group)
            compared = _compared([returns[m] for m in members], int(group), config)
            for member, values in zip(members, compared, strict=True):
                advantages[member] = values
    return advantages


def whiten(values: Float64Array) -> Float64Array:
    """(x - mean) / sqrt(var + 1e-8), unbiased, over all trained tokens of an optimizer step.

    Args:
        values: float64 [tokens].
    """
    if values.size < 2 or values.min() == values.max():
        return np.zeros_like(values)
    whitened: Float64Array = (values - values.mean()) / np.sqrt(
        values.var(ddof=1) + VARIANCE_EPSILON
    )
    return whitened


def overlong_penalty(
    lengths: npt.ArrayLike, longest: int, tokens: int, penalty: float
) -> Float64Array:
    """What comes off the reward of answers that nearly reach, or reach, the longest length.

    DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13): 0 up to `longest - tokens`, from
    there linearly to `penalty` at `longest`.

    Args:
        lengths: int [trajectories], response tokens.

    Raises:
        DataError: `tokens` is not in [1, longest].
    """
    if not 1 <= tokens <= longest:
        raise DataError(f"tokens = {tokens}: give 1 to the longest answer, {longest}")
    over = np.asarray(lengths, dtype=np.float64) - (longest - tokens)
    return penalty * np.clip(over / tokens, 0.0, 1.0)


def _returns(rewards: Float64Array, discount: float) -> Float64Array:
    returns = rewards.copy()
    for turn in range(returns.size - 2, -1, -1):
        returns[turn] += discount * returns[turn + 1]
    return returns


def _compared(
    returns: Sequence[Float64Array], group: int, config: AdvantageConfig
) -> Iterator[Float64Array]:
    """A group's returns minus their baselines, scaled."""
    if len(returns) < 2:
        raise DataError(
            f"group {group} has one trajectory: its advantage relative to the group would always "
            "be 0; sample each task at least twice, or set queue.min_group to 2 or more"
        )
    everything = np.concatenate(returns)
    if everything.min() == everything.max():
        yield from (np.zeros_like(values) for values in returns)
        return
    scale = 1.0
    if config.normalise is Normalise.GROUP:
        scale = float(everything.std(ddof=1)) + STD_EPSILON
    for values in returns:
        baseline = everything.mean()
        if config.baseline is Baseline.LEAVE_ONE_OUT:
            baseline = (everything.sum() - values.sum()) / (everything.size - values.size)
        yield (values - baseline) / scale
