"""From a leased batch to scored optimizer steps: all that is known before the first gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from leeway.algorithm import KlPlace
from leeway.config import TrainerConfig
from leeway.trajectory import Group
from trainer_service.algorithms.plan import Float64Array, plan_step, reference_penalties
from trainer_service.backends.base import Backend
from trainer_service.batching import StepPlan, pack


def plan_batch(
    groups: Sequence[Group], trainer: TrainerConfig, backend: Backend, *, longest_answer: int
) -> list[StepPlan]:
    """The optimizer steps of one batch: one for each of `trainer.minibatches`.

    Their micro-batches carry the log-probabilities at the start of the batch and those of the
    reference, where the algorithm looks at them.

    Args:
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
                spread=backend.spread,
            )
        )
    if algorithm.needs_start(len(plans)):
        plans = [with_start(plan, backend) for plan in plans]
    if algorithm.needs_reference:
        plans = [with_reference(plan, backend) for plan in plans]
    return plans


def with_start(plan: StepPlan, backend: Backend) -> StepPlan:
    """The plan, its micro-batches with the log-probabilities of the policy as it is now."""
    scored = zip(plan.microbatches, backend.logprobs(plan.microbatches), strict=True)
    return replace(plan, microbatches=tuple(replace(b, proximal=own) for b, own in scored))


def with_reference(plan: StepPlan, backend: Backend) -> StepPlan:
    """The plan, its micro-batches with the log-probabilities of the frozen reference."""
    logprobs = backend.logprobs(plan.microbatches, reference=True)
    scored = zip(plan.microbatches, logprobs, strict=True)
    return replace(plan, microbatches=tuple(replace(b, reference=own) for b, own in scored))


def _penalties(groups: Sequence[Group], trainer: TrainerConfig, backend: Backend) -> Float64Array:
    """What the KL takes from the reward of each trajectory: all are scored, the equal as well."""
    count = sum(len(group.trajectories) for group in groups)
    ones = np.ones(count)
    plan = pack(groups, ones, ones, trainer.microbatch_tokens, backend.spread)
    batches = with_reference(plan, backend).microbatches
    return reference_penalties(batches, trainer.algorithm.kl, count)
