"""Plans and objectives: what enters a step, how stale data counts, what is added to the loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from leeway.algorithm import (
    AdvantageConfig,
    Aggregation,
    AlgorithmConfig,
    KlConfig,
    KlEstimator,
    KlPlace,
    Normalise,
    PolicyConfig,
    PolicyLoss,
    Proximal,
)
from leeway.errors import ConfigError, DataError
from tests.trainer.trainer_cases import group, random_groups, trajectory
from trainer_service.algorithms.aggregation import token_weights
from trainer_service.algorithms.diagnostics import alerts, engine_agrees
from trainer_service.algorithms.objective import Objective
from trainer_service.algorithms.plan import plan_step, reference_penalties
from trainer_service.packed import PackedBatch

CENTRED = AdvantageConfig(normalise=Normalise.NONE)


def drawn(behaviour: list[float], **values: Any) -> PackedBatch:
    """Two trajectories of one token each, with advantages 1 and -1."""
    members = [
        trajectory([1, 2], [3 + i], index=i, logprobs=[lp], reward=float(i), **values)
        for i, lp in enumerate(behaviour)
    ]
    (batch,) = plan_step(
        [group(members)], AlgorithmConfig(advantage=CENTRED), microbatch_tokens=9, longest_answer=1
    ).microbatches
    return replace(
        batch, advantages=np.array([1.0, -1.0], dtype=np.float32), weights=np.ones(2, np.float32)
    )


def gradient_of(algorithm: AlgorithmConfig, batch: PackedBatch, version: int = 4) -> Tensor:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    entropy = -logprobs
    loss = Objective(algorithm, version)(batch, logprobs, entropy)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return gradient


@pytest.mark.parametrize("proximal", list(Proximal))
def test_stale_data_always_counts_by_its_ratio(proximal: Proximal) -> None:
    """Whichever policy the loss stays near, pi_theta / pi_behav = 2 doubles the gradient."""
    algorithm = AlgorithmConfig(policy=PolicyConfig(loss=PolicyLoss.REINFORCE), proximal=proximal)
    batch = drawn([-1.0, -1.0 - math.log(2.0)], version=1)
    torch.testing.assert_close(gradient_of(algorithm, batch), torch.tensor([-1.0, 2.0]))


def test_the_kl_and_the_entropy_are_added_to_the_loss() -> None:
    plain = AlgorithmConfig()
    batch = replace(drawn([-1.0, -1.0]), reference=np.array([-1.0, -3.0], dtype=np.float32))
    base = gradient_of(plain, batch)
    kl = plain.model_copy(update={"kl": KlConfig(coefficient=0.5, estimator=KlEstimator.K2)})
    torch.testing.assert_close(gradient_of(kl, batch) - base, torch.tensor([0.0, 0.5 * 2.0]))
    placed = KlConfig(coefficient=0.5, estimator=KlEstimator.K1, place=KlPlace.ADVANTAGE)
    teacher = plain.model_copy(update={"kl": placed})
    torch.testing.assert_close(gradient_of(teacher, batch) - base, torch.tensor([0.0, 1.0]))
    entropy = plain.model_copy(update={"entropy_coefficient": 0.1})
    torch.testing.assert_close(gradient_of(entropy, batch) - base, torch.tensor([0.1, 0.1]))
    with pytest.raises(DataError, match="reference"):
        gradient_of(kl, drawn([-1.0, -1.0]))


def test_a_second_moment_needs_the_starts_log_probabilities() -> None:
    algorithm = AlgorithmConfig(second_moment=0.04)
    plan = plan_step(random_groups(0), algorithm, microbatch_tokens=99, longest_answer=12)
    with pytest.raises(DataError, match="score it first"):
        Objective(algorithm, 0, plan)
    assert algorithm.needs_start(1)
    assert not AlgorithmConfig().needs_start(1)
    assert AlgorithmConfig().needs_start(2)


def test_the_kl_in_the_reward_is_summed_over_a_trajectorys_own_tokens() -> None:
    groups = random_groups(1)
    everything = AlgorithmConfig(kl=KlConfig(coefficient=1.0))
    plan = plan_step(groups, everything, microbatch_tokens=60, longest_answer=12)
    batches = [
        replace(batch, reference=(batch.behaviour - 0.5).astype(np.float32))
        for batch in plan.microbatches
    ]
    config = KlConfig(coefficient=0.1, estimator=KlEstimator.K1, place=KlPlace.REWARD)
    trained = [t.trained_tokens for g in groups for t in g.trajectories]
    penalties = reference_penalties(batches, config, len(trained))
    assert penalties == pytest.approx(0.05 * np.array(trained), rel=1e-5)
    algorithm = AlgorithmConfig(advantage=CENTRED)
    given = plan_step(
        groups, algorithm, microbatch_tokens=1000, longest_answer=12, penalties=penalties
    )
    rewards = [t.reward - p for t, p in zip(groups[0].trajectories, penalties[:4], strict=True)]
    (batch,) = given.microbatches
    for index, reward in enumerate(rewards):
        own = batch.advantages[batch.sequences == index]
        assert own == pytest.approx(reward - np.mean(rewards), rel=1e-5)


def test_a_trajectory_without_reward_is_an_error() -> None:
    members = [trajectory([1], [2], index=i, reward=r) for i, r in enumerate((1.0, None))]
    with pytest.raises(DataError, match="no reward"):
        plan_step([group(members)], AlgorithmConfig(), microbatch_tokens=9, longest_answer=1)


def test_groups_of_equal_rewards_are_counted_but_not_computed() -> None:
    equal = group([trajectory([1], [2, 3], index=i, reward=0.5) for i in range(2)])
    mixed = group([trajectory([1], [2], index=i, reward=i) for i in range(2)], 1)
    plan = plan_step([equal, mixed], AlgorithmConfig(), microbatch_tokens=9, longest_answer=2)
    assert (plan.trajectories, plan.packed_trajectories) == (4, 2)
    (batch,) = plan.microbatches
    assert batch.weights == pytest.approx(1 / 6)
    bonus = AlgorithmConfig(entropy_coefficient=0.1)
    plan = plan_step([equal, mixed], bonus, microbatch_tokens=9, longest_answer=2)
    assert plan.packed_trajectories == 4


def test_trajectories_without_trained_tokens_are_in_no_denominator() -> None:
    weights = token_weights(Aggregation.SEQ_MEAN_TOKEN_MEAN, [4, 0, 2], 1)
    assert weights.tolist() == [1 / 8, 0.0, 1 / 4]
    assert token_weights(Aggregation.TOKEN_MEAN, [0, 0], 1).tolist() == [0.0, 0.0]


def test_an_engine_with_other_numbers_is_noticed_on_the_first_fresh_batch() -> None:
    """A temperature or a head in another precision on one side shows as KL on own tokens."""
    algorithm = AlgorithmConfig()

    def metrics(behaviour: list[float], version: int) -> dict[str, float]:
        objective = Objective(algorithm, 4)
        logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
        objective(drawn(behaviour, version=version), logprobs, logprobs.detach())
        return objective.metrics()

    assert engine_agrees(metrics([-1.0, -1.0001], version=4))
    assert not engine_agrees(metrics([-1.0, -2.0], version=3))
    with pytest.raises(ConfigError, match="temperature and precision"):
        engine_agrees(metrics([-1.0, -1.3], version=4))


def test_metrics_outside_their_bounds_are_named() -> None:
    assert not alerts({"effective_sample_size": 0.9, "poisoned_tokens": 0.0, "unbounded": 9.0})
    found = alerts({"effective_sample_size": 0.4, "poisoned_tokens": 1.0})
    assert set(found) == {"effective_sample_size", "poisoned_tokens"}
