"""From the groups of one optimizer step to packed micro-batches: advantages, weights, packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from leeway.algorithm import AlgorithmConfig, KlConfig, KlPlace, Normalise
from leeway.errors import DataError
from leeway.trajectory import Group, Trajectory
from trainer_service.algorithms.advantages import group_relative, overlong_penalty, whiten
from trainer_service.algorithms.aggregation import token_weights
from trainer_service.algorithms.critic import estimate
from trainer_service.algorithms.kl import kl
from trainer_service.balance import ONE_RANK, Spread
from trainer_service.batching import by_token, pack
from trainer_service.packed import Float64Array, PackedBatch, StepPlan

TURN_REWARDS = "turn_rewards"
"""Extra of a trajectory, float [response]: what each turn earned, at one of its tokens."""


def plan_step(
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    *,
    microbatch_tokens: int,
    longest_answer: int,
    penalties: npt.ArrayLike = 0.0,
    values: Sequence[Float64Array] = (),
    spread: Spread = ONE_RANK,
) -> StepPlan:
    """Advantages and aggregation weights of the groups of one optimizer step, packed.

    Trajectories that cannot move the weights get the weight 0, and are not packed: those whose
    advantages are all exactly 0, unless the loss has terms without advantage.

    Args:
        longest_answer: Divisor of the `constant` aggregation unless the configuration gives
            another, and the length that `overlong_tokens` looks at; sampling.max_new_tokens.
        penalties: float [trajectories], what comes off each reward; see `reference_penalties`.
        values: With a critic: for each trajectory float64 [trained], of the state before each
            trained token.
        spread: The backend's.

    Raises:
        DataError: A trajectory has no reward, or a group only one trajectory.
        ConfigError: A trajectory was sampled in a way that the trainer cannot follow.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    config = algorithm.advantage
    off = np.broadcast_to(np.asarray(penalties, dtype=np.float64), len(trajectories))
    if config.overlong_tokens:
        off = off + overlong_penalty(
            [t.response_length for t in trajectories],
            longest_answer,
            config.overlong_tokens,
            config.overlong_penalty,
        )
    turns = [_turns(trajectory) for trajectory in trajectories]
    rewards = []
    for (_, earned), penalty in zip(turns, off, strict=True):
        own = config.reward_coefficient * earned
        own[-1] -= penalty
        rewards.append(own)
    returns: list[Float64Array] = []
    if config.needs_critic:
        estimates = [
            estimate(own, value, places, config.gae)
            for own, value, (places, _) in zip(rewards, values, turns, strict=True)
        ]
        advantages, returns = ([*of] for of in zip(*estimates, strict=True))
    else:
        sizes = [len(group.trajectories) for group in groups]
        of_turns = group_relative(rewards, np.repeat(np.arange(len(groups)), sizes), config)
        advantages = [own[places] for (places, _), own in zip(turns, of_turns, strict=True)]
    lengths = [values.size for values in advantages]
    if config.normalise is Normalise.BATCH and advantages:
        whole = whiten(np.concatenate(advantages))
        advantages = np.split(whole, np.cumsum(lengths)[:-1])
    weights = token_weights(
        algorithm.aggregation, lengths, algorithm.aggregation_constant or longest_answer
    )
    if not _moves_without_advantage(algorithm):
        weights = weights * np.array([bool(values.any()) for values in advantages])
    plan = pack(groups, advantages, weights, microbatch_tokens, spread)
    if not config.needs_critic:
        return plan
    valued = tuple(
        replace(
            batch,
            values=by_token(trajectories, batch, values),
            returns=by_token(trajectories, batch, returns),
        )
        for batch in plan.microbatches
    )
    return replace(plan, microbatches=valued)


def reference_penalties(
    batches: Sequence[PackedBatch], kl_config: KlConfig, trajectories: int
) -> Float64Array:
    """coefficient x KL(pi_behav || reference) summed over each trajectory's trained tokens.

    The estimate is of the policy that drew the tokens, so that staleness does not bias it.

    Args:
        batches: All of the step's trajectories, scored by the reference.
        trajectories: How many those are.

    Returns:
        float64 [trajectories].

    Raises:
        DataError: A batch was not scored by the reference.
    """
    penalties = np.zeros(trajectories)
    for batch in batches:
        if batch.reference is None:
            raise DataError("algorithm.kl: the batch lacks the reference's log-probabilities")
        estimates = kl(kl_config.estimator, torch.from_numpy(batch.behaviour - batch.reference))
        penalties += np.bincount(batch.sequences, weights=estimates.numpy(), minlength=trajectories)
    return kl_config.coefficient * penalties


def _moves_without_advantage(algorithm: AlgorithmConfig) -> bool:
    """Whether a loss has terms that a trajectory with an advantage of 0 takes part in."""
    in_loss = algorithm.needs_reference and algorithm.kl.place is not KlPlace.REWARD
    return in_loss or algorithm.entropy_coefficient > 0.0 or algorithm.advantage.needs_critic


def _turns(trajectory: Trajectory) -> tuple[npt.NDArray[np.intp], Float64Array]:
    """The turn of each trained token, int [tokens], and what each turn earned, float64 [turns].

    Without rewards by turn there is one turn. With them, a turn is a run of trained tokens and what
    follows up to the next; what of the reward no turn earned counts for the last one.

    Raises:
        DataError: There is no reward, or rewards by turn do not fit the response.
    """
    if trajectory.reward is None:
        raise DataError(
            f"trajectory {trajectory.trajectory_id!r} has no reward: partial generations are "
            "continued, not trained"
        )
    mask = trajectory.loss_mask
    by_token = trajectory.extras.get(TURN_REWARDS)
    if by_token is None or not mask.any():
        whole = np.array([trajectory.reward], dtype=np.float64)
        return np.zeros(trajectory.trained_tokens, dtype=np.intp), whole
    if by_token.shape != mask.shape or not np.isfinite(by_token).all():
        raise DataError(
            f"trajectory {trajectory.trajectory_id!r}: {TURN_REWARDS} {list(by_token.shape)}: give "
            f"one finite number for each of the {mask.size} response tokens"
        )
    starts = np.flatnonzero(mask & ~np.insert(mask[:-1], 0, False))
    earned = np.add.reduceat(by_token.astype(np.float64), starts)
    earned[-1] += trajectory.reward - float(by_token.sum())
    return np.searchsorted(starts, np.flatnonzero(mask), side="right") - 1, earned
