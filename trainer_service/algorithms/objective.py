"""From configuration to one optimizer step: what is packed, and the loss that the backend calls.

Called by the trainer's loop:

    plan = plan_step(groups, algorithm, microbatch_tokens=..., longest_answer=...)
    objective = Objective(algorithm, version)
    backend.step(plan.microbatches, objective)
    objective.metrics()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leeway.config import AlgorithmConfig
from leeway.errors import DataError
from leeway.trajectory import Group
from trainer_service.algorithms.advantages import AdvantageScale, group_relative
from trainer_service.algorithms.aggregation import Aggregation, token_weights
from trainer_service.algorithms.diagnostics import TokenSums, token_sums
from trainer_service.algorithms.policy_loss import (
    BehaviourAction,
    BehaviourBounds,
    decoupled_ppo,
)
from trainer_service.batching import PackedBatch, StepPlan, pack


def plan_step(
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    *,
    microbatch_tokens: int,
    longest_answer: int,
) -> StepPlan:
    """Advantages and aggregation weights of the groups of one optimizer step, packed.

    Args:
        longest_answer: Divisor of the `constant` aggregation unless the configuration gives
            another; sampling.max_new_tokens.

    Raises:
        DataError: A trajectory has no reward, or a group only one trajectory.
        ConfigError: A trajectory was sampled in a way that the trainer cannot follow.
    """
    rewards: list[float] = []
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.reward is None:
                raise DataError(
                    f"trajectory {trajectory.trajectory_id!r} has no reward: partial generations "
                    "are continued, not trained"
                )
            rewards.append(trajectory.reward)
    sizes = [len(group.trajectories) for group in groups]
    lengths = [t.trained_tokens for group in groups for t in group.trajectories]
    return pack(
        groups,
        advantages=group_relative(
            rewards,
            np.repeat(np.arange(len(groups)), sizes),
            AdvantageScale(algorithm.advantage_scale),
        ),
        weights=token_weights(
            Aggregation(algorithm.aggregation),
            lengths,
            algorithm.aggregation_constant or longest_answer,
        ),
        microbatch_tokens=microbatch_tokens,
    )


class Objective:
    """The decoupled PPO loss of one optimizer step; the `Loss` that a backend calls.

    Each call returns a micro-batch's share of the aggregated loss and adds to the diagnostics, so
    use one object for each step.
    """

    def __init__(self, algorithm: AlgorithmConfig, version: int) -> None:
        """`version` is the proximal policy's: the trainer's at the start of the batch."""
        self._clip_low = algorithm.clip_low
        self._clip_high = algorithm.clip_high
        self._bounds = BehaviourBounds(
            BehaviourAction(algorithm.behaviour_weight),
            algorithm.behaviour_cap,
            algorithm.behaviour_floor,
        )
        self._version = version
        self._sums = TokenSums()

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """The scalar loss; `logprobs`, float [n], carry the gradient; `entropy` is float [n]."""

        def tensor(values: npt.NDArray[Any]) -> Tensor:
            return torch.as_tensor(values, device=logprobs.device)

        proximal = logprobs.detach() if batch.proximal is None else tensor(batch.proximal)
        behaviour = tensor(batch.behaviour)
        mask = torch.ones_like(behaviour, dtype=torch.bool)
        policy = decoupled_ppo(
            logprobs,
            proximal,
            behaviour,
            tensor(batch.advantages),
            mask,
            clip_low=self._clip_low,
            clip_high=self._clip_high,
            bounds=self._bounds,
        )
        loss = (tensor(batch.weights) * policy.loss).sum()
        self._sums += token_sums(
            policy,
            total=loss,
            proximal=proximal,
            behaviour=behaviour,
            entropy=entropy,
            mask=mask,
            fresh=tensor(batch.versions) == self._version,
        )
        return loss

    def metrics(self) -> dict[str, float]:
        """Over all micro-batches so far; names and bounds in `TokenSums.metrics`."""
        return self._sums.metrics()
