"""What must never change the loss, and what must never break it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trainer_cases import group, random_groups, trajectory

from leeway.config import AlgorithmConfig
from leeway.errors import DataError
from trainer_service.algorithms.advantages import AdvantageScale, group_relative
from trainer_service.algorithms.aggregation import Aggregation, token_weights
from trainer_service.algorithms.objective import Objective, plan_step
from trainer_service.algorithms.policy_loss import (
    BehaviourAction,
    BehaviourBounds,
    PolicyLoss,
    decoupled_ppo,
)

GARBAGE = [float("nan"), float("inf"), float("-inf"), -9999.0, 1e30]
BOUNDS = [
    BehaviourBounds(BehaviourAction.TRUNCATE, 5.0),
    BehaviourBounds(BehaviourAction.MASK, 5.0, 0.5),
]


def evaluate(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    bounds: BehaviourBounds,
) -> tuple[PolicyLoss, Tensor]:
    """The loss, and the gradient of its sum to the current log-probabilities."""
    current = current.clone().requires_grad_()
    policy = decoupled_ppo(
        current,
        proximal,
        behaviour,
        advantages,
        mask,
        clip_low=0.2,
        clip_high=0.28,
        bounds=bounds,
    )
    (gradient,) = torch.autograd.grad(policy.loss.sum(), current)
    return policy, gradient


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    garbage=st.lists(st.sampled_from(GARBAGE), min_size=4, max_size=4),
    bounds=st.sampled_from(BOUNDS),
)
def test_the_value_of_masked_tokens_does_not_matter(
    seed: int, garbage: list[float], bounds: BehaviourBounds
) -> None:
    generator = torch.Generator().manual_seed(seed)
    arrays = [-3 * torch.rand(24, generator=generator) for _ in range(3)]
    arrays.append(torch.randn(24, generator=generator))
    mask = torch.rand(24, generator=generator) < 0.6
    clean, gradient = evaluate(*arrays, mask, bounds)
    spoiled = [torch.where(mask, a, torch.tensor(v)) for a, v in zip(arrays, garbage, strict=True)]
    dirty, dirty_gradient = evaluate(*spoiled, mask, bounds)
    for ours, theirs in (
        (clean.loss, dirty.loss),
        (gradient, dirty_gradient),
        (clean.ratio, dirty.ratio),
        (clean.behaviour.applied, dirty.behaviour.applied),
    ):
        assert torch.equal(ours, theirs)
    assert (gradient[~mask] == 0).all()


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.tuples(*[st.floats(-1000.0, 0.0, width=32)] * 3, st.floats(-10.0, 10.0, width=32)),
        min_size=1,
        max_size=20,
    ),
    bounds=st.sampled_from(BOUNDS),
)
def test_extreme_log_ratios_give_finite_losses_and_gradients(
    values: list[tuple[float, float, float, float]], bounds: BehaviourBounds
) -> None:
    arrays = [torch.tensor(column, dtype=torch.float32) for column in zip(*values, strict=True)]
    policy, gradient = evaluate(*arrays, torch.ones(len(values), dtype=torch.bool), bounds)
    assert policy.loss.isfinite().all()
    assert gradient.isfinite().all()
    assert (policy.behaviour.applied <= bounds.cap).all()


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("which", range(3))
def test_a_poisoned_token_is_selected_away(which: int, bounds: BehaviourBounds) -> None:
    arrays = [torch.full((3,), -1.0) for _ in range(3)]
    arrays[which][1] = float("nan")
    policy, gradient = evaluate(*arrays, torch.ones(3), torch.ones(3, dtype=torch.bool), bounds)
    assert policy.loss.tolist() == [-1.0, 0.0, -1.0]
    assert gradient.tolist() == [-1.0, 0.0, -1.0]


def test_the_behaviour_weight_scales_the_gradient() -> None:
    current = proximal = torch.full((3,), -1.0)
    behaviour = torch.tensor([-1.0, -2.0, -4.0])
    _, gradient = evaluate(
        current, proximal, behaviour, torch.ones(3), torch.ones(3, dtype=torch.bool), BOUNDS[0]
    )
    torch.testing.assert_close(gradient, -torch.tensor([1.0, 2.718282, 5.0]))


def test_the_clip_is_asymmetric_and_stops_the_gradient() -> None:
    ratio = torch.tensor([1.27, 1.29, 1.29, 0.81, 0.79, 0.79])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 1.0])
    zeros = torch.zeros(6)
    policy, gradient = evaluate(
        ratio.log(), zeros, zeros, advantages, torch.ones(6, dtype=torch.bool), BOUNDS[0]
    )
    assert policy.clipped.tolist() == [False, True, False, False, True, False]
    assert (gradient == 0).tolist() == policy.clipped.tolist()


@pytest.mark.parametrize("aggregation", list(Aggregation))
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), budgets=st.tuples(st.integers(1, 60), st.integers(1, 200)))
def test_the_split_into_microbatches_does_not_matter(
    aggregation: Aggregation, seed: int, budgets: tuple[int, int]
) -> None:
    groups = random_groups(seed)
    algorithm = AlgorithmConfig(aggregation=aggregation.value)
    outcomes = []
    for budget in budgets:
        objective = Objective(algorithm, version=1)
        loss, gradients = 0.0, {}
        plan = plan_step(groups, algorithm, microbatch_tokens=budget, longest_answer=12)
        for batch in plan.microbatches:
            # Any function of the token will do for a policy.
            logprobs = torch.from_numpy(-0.1 * (1 + batch.targets % 7)).float().requires_grad_()
            total = objective(batch, logprobs, torch.ones_like(logprobs).detach())
            (gradient,) = torch.autograd.grad(total, logprobs)
            loss += float(total.detach())
            for sequence in np.unique(batch.sequences):
                gradients[int(sequence)] = gradient[torch.from_numpy(batch.sequences == sequence)]
        outcomes.append((loss, gradients, objective.metrics()))
    (loss, gradients, metrics), (other_loss, other_gradients, other_metrics) = outcomes
    assert loss == pytest.approx(other_loss, abs=1e-5)
    assert gradients.keys() == other_gradients.keys()
    assert all(torch.equal(gradients[s], other_gradients[s]) for s in gradients)
    assert metrics == pytest.approx(other_metrics, abs=1e-5)


def test_equal_rewards_have_advantages_of_exactly_zero() -> None:
    rewards = [0.1, 0.1, 0.1, 1.0, 0.0]
    advantages = group_relative(rewards, [4, 4, 4, 2, 2], AdvantageScale.GROUP_STD)
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert advantages[3] == -advantages[4] > 0


def test_partial_groups_are_normalised_at_their_true_size() -> None:
    """A lost member neither counts as a zero nor shifts its neighbours onto another prompt."""
    whole = group_relative([1, 0, 3, 5], [0, 0, 1, 1], AdvantageScale.NONE)
    partial = group_relative([1, 0, 7, 3, 5], [0, 0, 0, 1, 1], AdvantageScale.NONE)
    assert whole[2:].tolist() == partial[3:].tolist() == [-1.0, 1.0]


def test_a_group_of_one_is_an_error() -> None:
    with pytest.raises(DataError, match="min_group"):
        group_relative([1.0, 0.0, 1.0], [0, 0, 1], AdvantageScale.NONE)


def test_a_trajectory_without_reward_is_an_error() -> None:
    members = [trajectory([1], [2], index=i, reward=r) for i, r in enumerate((1.0, None))]
    with pytest.raises(DataError, match="no reward"):
        plan_step([group(members)], AlgorithmConfig(), microbatch_tokens=9, longest_answer=1)


def test_trajectories_without_trained_tokens_are_in_no_denominator() -> None:
    weights = token_weights(Aggregation.SEQ_MEAN_TOKEN_MEAN, [4, 0, 2], 1)
    assert weights.tolist() == [1 / 8, 0.0, 1 / 4]
    assert token_weights(Aggregation.TOKEN_MEAN, [0, 0], 1).tolist() == [0.0, 0.0]
