"""Advantage estimators: from a batch's rewards to one number a trajectory.

Pure functions of (rewards, group of each). What must hold: trajectories are compared within their
own group only, at the group's true size, whatever was lost on the way.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

from leeway.errors import DataError

STD_EPSILON = 1e-6
"""Added to the standard deviation, as DeepSeekMath's implementations do."""


class AdvantageScale(StrEnum):
    """What group-relative advantages are divided by."""

    GROUP_STD = "group_std"
    NONE = "none"


def group_relative(
    rewards: npt.ArrayLike, groups: npt.ArrayLike, scale: AdvantageScale
) -> npt.NDArray[np.float64]:
    """A_i = r_i - mean(r), divided by std(r) + 1e-6 (unbiased, n - 1) when scaled by GROUP_STD.

    GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.2); without the division Dr. GRPO
    (Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2). In a group of equal
    rewards every advantage is exactly 0.

    Args:
        rewards: float [trajectories].
        groups: int [trajectories], equal numbers for trajectories of one task.

    Returns:
        float64 [trajectories].

    Raises:
        DataError: A reward is NaN or infinite, the lengths differ, or a group has one member: its
            reward would vanish.
    """
    r = np.asarray(rewards, dtype=np.float64)
    g = np.asarray(groups, dtype=np.int64)
    if r.ndim != 1 or g.shape != r.shape:
        raise DataError(f"rewards {list(r.shape)}, groups {list(g.shape)}: give one of each, [n]")
    if not np.isfinite(r).all():
        raise DataError(f"rewards = {r.tolist()}: every reward must be finite")
    advantages = np.zeros_like(r)
    for group in np.unique(g):
        members = np.flatnonzero(g == group)
        if members.size < 2:
            raise DataError(
                f"group {group} has one trajectory: its advantage relative to the group would "
                "always be 0; sample each task at least twice, or set queue.min_group to 2 or more"
            )
        own = r[members]
        if own.min() == own.max():
            continue
        centred = own - own.mean()
        if scale is AdvantageScale.GROUP_STD:
            centred = centred / (own.std(ddof=1) + STD_EPSILON)
        advantages[members] = centred
    return advantages
