"""From a leased batch to scored optimizer steps: all that is known before the first gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from leeway.algorithm import KlPlace
from leeway.config import TrainerConfig
from leeway.trajectory import Group
from trainer_service.algorithms.plan import plan_step, reference_penalties
from trainer_service.backends.base import Backend
from trainer_service.batching import by_trajectory, pack
from trainer_service.packed import Float64Array, StepPlan


def plan_batch(
    groups: Sequence[Group],
    trainer: TrainerConfig,
    backend: Backend,
    critic: Backend | None = None,
    *,
    longest_answer: int,
) -> list[StepPlan]:
    """The optimizer steps of one batch: one for each of `trainer.minibatches`.

    Their micro-batches carry the log-probabilities at the start of the batch and those of the
    reference, where the algorithm looks at them, and the critic's values.

    Args:
        critic: With `baseline: critic`.
        longest_answer: sampling.max_new_tokens.

    Raises:
        DataError, ConfigError: See `plan_step`.
    """
    algorithm = trainer.algorithm
    penalised = algorithm.needs_reference and algorithm.kl.place is KlPlace.REWARD
    size = max(1, len(groups) // trainer.minibatches)
    plans = []
    for start in range(0, len(groups), size):
        own = groups[start : start + size]
        penalties = _penalties(own, trainer, backend) if penalised else 0.0
        plans.append(
            plan_step(
                own,
                algorithm,
                microbatch_tokens=trainer.microbatch_tokens,
                longest_answer=longest_answer,
                penalties=penalties,
                values=() if critic is None else _values(own, trainer, critic),
                spread=backend.spread,
            )
        )
    if algorithm.needs_start(len(plans)):
        plans = [_with_start(plan, backend) for plan in plans]
    if algorithm.needs_reference:
        plans = [with_reference(plan, backend) for plan in plans]
    return plans


def _with_start(plan: StepPlan, backend: Backend) -> StepPlan:
    """The plan, its micro-batches with the log-probabilities of the policy as it is now."""
    scored = zip(plan.microbatches, backend.scores(plan.microbatches), strict=True)
    return replace(plan, microbatches=tuple(replace(b, proximal=own) for b, own in scored))


def with_reference(plan: StepPlan, backend: Backend) -> StepPlan:
    """The plan, its micro-batches with the log-probabilities of the frozen reference."""
    logprobs = backend.scores(plan.microbatches, reference=True)
    scored = zip(plan.microbatches, logprobs, strict=True)
    return replace(plan, microbatches=tuple(replace(b, reference=own) for b, own in scored))


def _penalties(groups: Sequence[Group], trainer: TrainerConfig, backend: Backend) -> Float64Array:
    """What the KL takes from the reward of each trajectory."""
    plan = _everything(groups, trainer, backend)
    batches = with_reference(plan, backend).microbatches
    count = sum(len(group.trajectories) for group in groups)
    return reference_penalties(batches, trainer.algorithm.kl, count)


def _values(groups: Sequence[Group], trainer: TrainerConfig, critic: Backend) -> list[Float64Array]:
    """The critic's, for each trajectory float64 [trained]."""
    batches = _everything(groups, trainer, critic).microbatches
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return by_trajectory(trajectories, batches, critic.scores(batches))


def _everything(groups: Sequence[Group], trainer: TrainerConfig, backend: Backend) -> StepPlan:
    """All trajectories to be scored, those as well that cannot move the weights."""
    ones = np.ones(sum(len(group.trajectories) for group in groups))
    return pack(groups, ones, ones, trainer.microbatch_tokens, backend.spread)
