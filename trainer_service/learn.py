"""What one batch teaches: its optimizer steps. No queue, no clock; the loop calls it in the compute
thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from leeway.config import Config
from leeway.trajectory import Group
from trainer_service.algorithms.critic import ValueLoss, mean_of
from trainer_service.algorithms.diagnostics import engine_agrees
from trainer_service.algorithms.objective import Objective
from trainer_service.backends.base import StepResult
from trainer_service.learners import Learners
from trainer_service.packed import StepPlan
from trainer_service.steps import plan_batch


@dataclass(frozen=True, slots=True)
class Learned:
    """Of one batch: the plans and objectives of its optimizer steps.

    Attributes:
        objectives: None where only the critic learned.
        grad_norm, lr: Of the policy's last step; 0 where only the critic learned.
        critic: Metrics of the critic's steps, where there is one.
        checked_engine: It was seen that engine and trainer hold the same numbers.
    """

    plans: Sequence[StepPlan]
    objectives: Sequence[Objective]
    grad_norm: float
    lr: float
    critic: Mapping[str, float] = field(default_factory=dict)
    checked_engine: bool = False


def learn(
    groups: Sequence[Group],
    config: Config,
    learners: Learners,
    version: int,
    changing: Callable[[], AbstractContextManager[None]],
    *,
    check_engine: bool,
) -> Learned:
    """One optimizer step for each of `trainer.minibatches`, of policy and critic; at first of the
    critic alone, for `critic.warmup_batches`.

    Args:
        version: The trainer's at the start of the batch.
        changing: Entered around each step; what it raises keeps the optimizer out.
        check_engine: Refuse a batch that shows that engine and trainer disagree, before its first
            step.

    Raises:
        ConfigError: They do; see also `plan_batch`.
        DataError, DivergedError: See `plan_batch` and `Backend.apply`.
    """
    trainer, policy, critic = config.trainer, learners.policy, learners.critic
    longest = config.sampling.max_new_tokens
    plans = plan_batch(groups, trainer, policy, critic, longest_answer=longest)
    warming = version < trainer.critic.warmup_batches
    objectives = [Objective(trainer.algorithm, version, plan) for plan in plans if not warming]
    result = StepResult(grad_norm=0.0, lr=0.0)
    of_critic: list[Mapping[str, float]] = []
    checked = False
    for number, plan in enumerate(plans):
        if not warming:
            policy.accumulate(plan.microbatches, objectives[number])
            if check_engine and number == 0:
                checked = engine_agrees(objectives[0].metrics())
        values = None if critic is None else ValueLoss(plan, trainer.critic.value_clip)
        if critic is not None and values is not None:
            critic.accumulate(plan.microbatches, values)
        with changing():
            if not warming:
                result = policy.apply()
            if critic is not None and values is not None:
                norm = critic.apply().grad_norm
                of_critic.append({**values.metrics(), "critic_grad_norm": norm})
    return Learned(plans, objectives, result.grad_norm, result.lr, mean_of(of_critic), checked)
