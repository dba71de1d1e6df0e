"""What a recorded trajectory says about its training, for people who read it (`leeway view`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from leeway.trajectory import Group, Trajectory
from trainer_service.batching import listed
from trainer_service.packed import PackedBatch

Scored = tuple[PackedBatch, npt.NDArray[np.float32]]


def annotated(group: Group, scored: Iterable[Scored]) -> Group:
    """The group with what became of each token, as extras: float32 [response], NaN where unknown.

    `advantages`, and `log_ratios`: log of pi_theta / pi_behav when the token was learned from.

    Args:
        group: The first of its optimizer step.
        scored: Micro-batches of that step, and their tokens' log-probabilities, float32 [n].
    """
    batches = list(scored)
    return replace(
        group,
        trajectories=tuple(
            _annotated(trajectory, sequence, batches)
            for sequence, trajectory in enumerate(group.trajectories)
        ),
    )


def _annotated(trajectory: Trajectory, sequence: int, scored: Iterable[Scored]) -> Trajectory:
    for batch, current in scored:
        own = batch.sequences == sequence
        if not own.any():
            continue
        extras = dict(trajectory.extras)
        places = listed(trajectory)
        for name, values in (
            ("advantages", batch.advantages[own]),
            ("log_ratios", current[own] - batch.behaviour[own]),
        ):
            spread = np.full(trajectory.response_length, np.nan, dtype=np.float32)
            spread[places] = values
            extras[name] = spread
        return replace(trajectory, extras=MappingProxyType(extras))
    return trajectory
