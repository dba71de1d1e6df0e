"""Advantages, losses, corrections and plans, against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainer_cases import group, random_groups, trajectory

from leeway.algorithm import (
    AdvantageConfig,
    Aggregation,
    AlgorithmConfig,
    Baseline,
    BoundAction,
    KlConfig,
    KlEstimator,
    KlPlace,
    Level,
    Normalise,
    PolicyConfig,
    PolicyLoss,
    Proximal,
    RejectConfig,
    RejectLevel,
    WeightConfig,
)
from leeway.errors import ConfigError, DataError
from trainer_service.algorithms.advantages import group_relative, overlong_penalty, whiten
from trainer_service.algorithms.aggregation import token_weights
from trainer_service.algorithms.correction import (
    behaviour_weights,
    proximal_logprobs,
    rejected,
    second_moment_bound,
)
from trainer_service.algorithms.critic import gae, turn_steps, value_loss
from trainer_service.algorithms.diagnostics import alerts, engine_agrees
from trainer_service.algorithms.objective import Objective
from trainer_service.algorithms.plan import TURN_REWARDS, plan_step, reference_penalties
from trainer_service.algorithms.policy_loss import TokenLosses, token_losses
from trainer_service.algorithms.tokens import Sequences
from trainer_service.batching import PackedBatch

CENTRED = AdvantageConfig(normalise=Normalise.NONE)


def whole(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bool)


def losses(
    policy: PolicyConfig, ratios: list[float], advantages: list[float], sequences: list[int]
) -> tuple[TokenLosses, Tensor]:
    """Losses of tokens whose proximal policy is uniform over two tokens, and d loss / d logprob."""
    proximal = torch.full((len(ratios),), math.log(0.5))
    current = (proximal + torch.tensor(ratios).log()).requires_grad_()
    valid = whole(len(ratios))
    ours = token_losses(
        policy,
        current,
        proximal,
        torch.tensor(advantages),
        valid,
        Sequences(torch.tensor(sequences), valid),
    )
    (gradient,) = torch.autograd.grad(ours.loss.sum(), current)
    return ours, gradient


# Advantages --------------------------------------------------------------------------------------


def test_equal_rewards_have_advantages_of_exactly_zero() -> None:
    advantages = group_relative([0.1, 0.1, 0.1, 1.0, 0.0], [4, 4, 4, 2, 2], AdvantageConfig())
    assert [float(a[0]) for a in advantages[:3]] == [0.0, 0.0, 0.0]
    assert advantages[3] == -advantages[4] > 0


def test_partial_groups_are_normalised_at_their_true_size() -> None:
    """A lost member neither counts as a zero nor shifts its neighbours onto another prompt."""
    full = group_relative([1, 0, 3, 5], [0, 0, 1, 1], CENTRED)
    partial = group_relative([1, 0, 7, 3, 5], [0, 0, 0, 1, 1], CENTRED)
    assert np.concatenate(full[2:]).tolist() == np.concatenate(partial[3:]).tolist() == [-1, 1]


def test_leave_one_out_compares_with_the_others() -> None:
    config = AdvantageConfig(baseline=Baseline.LEAVE_ONE_OUT, normalise=Normalise.NONE)
    assert np.concatenate(group_relative([1, 2, 6], [0, 0, 0], config)).tolist() == [-3, -1.5, 4.5]


@pytest.mark.parametrize("baseline", [Baseline.GROUP, Baseline.LEAVE_ONE_OUT])
def test_a_group_of_one_is_an_error(baseline: Baseline) -> None:
    config = AdvantageConfig(baseline=baseline)
    with pytest.raises(DataError, match="min_group"):
        group_relative([1.0, 0.0, 1.0], [0, 0, 1], config)


def test_a_turn_is_credited_with_its_own_and_later_rewards() -> None:
    config = AdvantageConfig(baseline=Baseline.NONE, normalise=Normalise.NONE, turn_discount=0.5)
    (one, two) = group_relative([[1.0, 0.0, 4.0], [2.0]], [0, 0], config)
    assert one.tolist() == [2.0, 2.0, 4.0]
    assert two.tolist() == [2.0]


def test_turns_are_compared_over_the_group_and_spread_over_their_tokens() -> None:
    def turns(index: int, rewards: list[float], mask: list[bool], outcome: float) -> Any:
        extras = {TURN_REWARDS: np.array(rewards, dtype=np.float32)}
        answer = list(range(3, 3 + len(mask)))
        plain = trajectory([1, 2], answer, index=index, mask=mask, reward=outcome)
        return replace(plain, extras=MappingProxyType(extras))

    # Two sampled tokens, one of a tool, two sampled tokens; then a trajectory of one turn. Of the
    # reward of 4 the second turn earned 2, and 1 came at the end.
    members = [turns(0, [0, 1, 0, 0, 2], [True, True, False, True, True], 4.0)]
    members.append(turns(1, [2], [True], 2.0))
    algorithm = AlgorithmConfig(advantage=CENTRED)
    (batch,) = plan_step(
        [group(members)], algorithm, microbatch_tokens=99, longest_answer=9
    ).microbatches
    # Returns 4, 3 and 2, mean 3: the turn at the mean gets 0, and is packed with its trajectory.
    assert batch.advantages[batch.sequences == 0].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert batch.advantages[batch.sequences == 1].tolist() == [-1.0]
    with pytest.raises(DataError, match="turn_rewards"):
        plan_step(
            [group([turns(0, [1.0, 3.0], [True], 4.0), members[1]])],
            algorithm,
            microbatch_tokens=99,
            longest_answer=9,
        )


def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_steps_tokens() -> None:
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(baseline=Baseline.NONE, normalise=Normalise.BATCH)
    )
    plan = plan_step(random_groups(3), algorithm, microbatch_tokens=40, longest_answer=12)
    advantages = np.concatenate([batch.advantages for batch in plan.microbatches])
    assert advantages.size == plan.trained_tokens
    assert advantages.mean() == pytest.approx(0.0, abs=1e-6)
    assert advantages.std(ddof=1) == pytest.approx(1.0, abs=1e-5)
    assert whiten(np.array([2.0, 2.0])).tolist() == [0.0, 0.0]


def test_overlong_answers_lose_reward_linearly() -> None:
    assert overlong_penalty([6, 7, 8, 10, 12], 10, 4, 1.0).tolist() == [0, 0.25, 0.5, 1, 1]
    members = [trajectory([1], [2] * n, index=n, reward=1.0) for n in (2, 4)]
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(normalise=Normalise.NONE, overlong_tokens=2)
    )
    (batch,) = plan_step(
        [group(members)], algorithm, microbatch_tokens=99, longest_answer=4
    ).microbatches
    assert sorted(set(batch.advantages.tolist())) == [-0.5, 0.5]


def test_gae_by_hand_and_by_turns() -> None:
    advantages, returns = gae([1.0, 2.0], [0.5, 1.0], 0.9, 0.5)
    # delta_1 = 2 - 1 = 1; delta_0 = 1 + 0.9 - 0.5 = 1.4; A_0 = 1.4 + 0.45.
    assert advantages.tolist() == pytest.approx([1.85, 1.0])
    assert returns.tolist() == pytest.approx([2.35, 2.0])
    rewards, values = turn_steps([0.0, 1.0, 2.0], [0.1, 0.2, 0.3], [0, 0, 1])
    assert rewards.tolist() == [1.0, 2.0]
    assert values.tolist() == [0.1, 0.3]
    with pytest.raises(DataError, match="turns"):
        turn_steps([0.0, 1.0], [0.1, 0.2], [0, 2])
    with pytest.raises(DataError, match="finite"):
        gae([math.nan], [0.0], 1.0, 1.0)


def test_the_value_loss_takes_the_worse_of_clipped_and_not() -> None:
    loss = value_loss(
        torch.tensor([1.0, 0.1, math.nan]),
        torch.zeros(3),
        torch.tensor([2.0, 0.0, 0.0]),
        torch.tensor([True, True, False]),
        0.2,
    )
    torch.testing.assert_close(loss, torch.tensor([0.5 * 1.8**2, 0.5 * 0.1**2, 0.0]))


# Policy losses -----------------------------------------------------------------------------------


def test_the_clip_is_asymmetric_and_stops_the_gradient() -> None:
    ours, gradient = losses(
        PolicyConfig(),
        [1.27, 1.29, 1.29, 0.81, 0.79, 0.79],
        [1.0, 1.0, -1.0, -1.0, -1.0, 1.0],
        [0] * 6,
    )
    assert ours.clipped.tolist() == [False, True, False, False, True, False]
    assert (gradient == 0).tolist() == ours.clipped.tolist()


def test_the_dual_clip_bounds_negative_advantages_only() -> None:
    ours, gradient = losses(PolicyConfig(dual_clip=3.0), [4.0, 2.0], [-1.0, -1.0], [0, 0])
    torch.testing.assert_close(ours.loss, torch.tensor([3.0, 2.0]))
    torch.testing.assert_close(gradient, torch.tensor([0.0, 2.0]))


def test_reinforce_is_the_importance_weighted_gradient() -> None:
    ours, gradient = losses(
        PolicyConfig(loss=PolicyLoss.REINFORCE), [9.0, 0.5], [1.0, -2.0], [0, 0]
    )
    torch.testing.assert_close(ours.loss, torch.tensor([-9.0, 1.0]))
    torch.testing.assert_close(gradient, torch.tensor([-9.0, 1.0]))


def test_gspo_clips_the_whole_sequence() -> None:
    policy = PolicyConfig(loss=PolicyLoss.GSPO, clip_low=0.2, clip_high=0.2)
    # Geometric means 1 and 2: the second sequence is clipped as one.
    ours, gradient = losses(policy, [4.0, 0.25, 4.0, 1.0], [1.0] * 4, [0, 0, 1, 1])
    torch.testing.assert_close(ours.loss, torch.tensor([-1.0, -1.0, -1.2, -1.2]))
    torch.testing.assert_close(gradient, torch.tensor([-1.0, -1.0, 0.0, 0.0]))
    assert ours.clipped.tolist() == [False, False, True, True]


def test_geo_mean_clips_each_token_inside_the_mean() -> None:
    policy = PolicyConfig(loss=PolicyLoss.GEO_MEAN, clip_low=0.4, clip_high=math.log(2.0))
    ours, gradient = losses(policy, [8.0, 0.5], [1.0, 1.0], [0, 0])
    # 8 counts as 2: the mean is 1. Each token's loss moves the unclipped one by half.
    torch.testing.assert_close(ours.loss, torch.tensor([-1.0, -1.0]))
    torch.testing.assert_close(gradient, torch.tensor([0.0, -1.0]))


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    policy = PolicyConfig(loss=PolicyLoss.CISPO, clip_low=0.5, clip_high=1.0)
    _, gradient = losses(policy, [5.0, 0.1, 1.5], [1.0, 1.0, -1.0], [0] * 3)
    torch.testing.assert_close(gradient, torch.tensor([-2.0, -0.5, 1.5]))


def test_aipo_bounds_the_ratio_on_one_side() -> None:
    policy = PolicyConfig(loss=PolicyLoss.AIPO, clip_high=1.0)
    ours, gradient = losses(policy, [5.0, 0.1], [1.0, 1.0], [0, 0])
    torch.testing.assert_close(gradient, torch.tensor([-2.0, -0.1]))
    assert ours.clipped.tolist() == [True, False]


def test_sapo_is_the_policy_gradient_at_ratio_1_and_fades_away_from_it() -> None:
    policy = PolicyConfig(loss=PolicyLoss.SAPO)
    _, gradient = losses(policy, [1.0, 1.0, 8.0], [1.0, -1.0, 1.0], [0] * 3)
    torch.testing.assert_close(gradient[:2], torch.tensor([-1.0, 1.0]))
    gate = 1 / (1 + math.exp(-7.0))
    assert float(gradient[2]) == pytest.approx(-4 * gate * (1 - gate) * 8.0, rel=1e-4)


def test_dppo_masks_tokens_whose_probability_moved_too_far_away() -> None:
    policy = PolicyConfig(loss=PolicyLoss.DPPO, clip_low=0.2, clip_high=0.2)
    # Probabilities 0.75, 0.65, 0.25, 0.75 against 0.5.
    ours, gradient = losses(policy, [1.5, 1.3, 0.5, 1.5], [1.0, 1.0, -1.0, -1.0], [0] * 4)
    assert ours.clipped.tolist() == [True, False, True, False]
    torch.testing.assert_close(gradient, torch.tensor([0.0, -1.3, 0.0, 1.5]))


# Corrections -------------------------------------------------------------------------------------

SEQUENCES = Sequences(torch.tensor([0, 0, 1]), whole(3))
LOGS = torch.tensor([2.0, 8.0, 0.25]).log()


@pytest.mark.parametrize(
    ("level", "action", "floor", "applied"),
    [
        (Level.TOKEN, BoundAction.TRUNCATE, 0.0, [2.0, 5.0, 0.25]),
        (Level.TOKEN, BoundAction.MASK, 0.5, [2.0, 0.0, 0.0]),
        (Level.SEQUENCE, BoundAction.TRUNCATE, 0.0, [5.0, 5.0, 0.25]),
        (Level.SEQUENCE, BoundAction.MASK, 0.0, [0.0, 0.0, 0.25]),
        (Level.GEOMETRIC, BoundAction.TRUNCATE, 0.0, [4.0, 4.0, 0.25]),
        (Level.GEOMETRIC, BoundAction.MASK, 0.5, [4.0, 4.0, 0.0]),
    ],
)
def test_behaviour_weights(
    level: Level, action: BoundAction, floor: float, applied: list[float]
) -> None:
    config = WeightConfig(level=level, action=action, cap=5.0, floor=floor)
    _, weights, _ = behaviour_weights(config, LOGS, whole(3), SEQUENCES)
    torch.testing.assert_close(weights, torch.tensor(applied))


@pytest.mark.parametrize(
    ("rule", "out"),
    [
        # pi_behav / pi_prox is 1/2, 1/8 and 4; of the sequences 1/4 and 4.
        (RejectConfig(measure=KlEstimator.K1, level=RejectLevel.TOKEN, upper=3.0), [0, 0, 1]),
        (RejectConfig(measure=KlEstimator.K1, level=RejectLevel.TOKEN, lower=0.3), [0, 1, 0]),
        (RejectConfig(measure=KlEstimator.K1, level=RejectLevel.SEQ_MEAN, lower=0.3), [1, 1, 0]),
        (RejectConfig(measure=KlEstimator.K1, level=RejectLevel.SEQ_MAX, lower=0.3), [1, 1, 0]),
        (RejectConfig(measure=KlEstimator.K2, level=RejectLevel.SEQ_MAX, upper=2.0), [1, 1, 0]),
        # DeepSeek-V3.2: negative advantages only, mean log pi_behav / pi_prox above 1.
        (
            RejectConfig(
                measure=KlEstimator.K1,
                level=RejectLevel.SEQ_MEAN,
                upper=math.e,
                negative_only=True,
            ),
            [0, 0, 1],
        ),
        (
            RejectConfig(
                measure=KlEstimator.K2, level=RejectLevel.TOKEN, upper=1.0, negative_only=True
            ),
            [0, 1, 0],
        ),
    ],
)
def test_rejections(rule: RejectConfig, out: list[int]) -> None:
    advantages = torch.tensor([-1.0, -1.0, -1.0 if rule.measure is KlEstimator.K1 else 1.0])
    assert rejected([rule], LOGS, advantages, whole(3), SEQUENCES).int().tolist() == out


def test_the_second_moment_of_the_step_is_held() -> None:
    assert second_moment_bound([0.1, -0.2, 0.3, -1.0], 0.05) == pytest.approx(0.3)
    assert second_moment_bound([0.1, -0.2, 0.3], 0.05) == math.inf
    assert second_moment_bound([0.5, -0.5], 0.05) == 0.0
    assert second_moment_bound([0.1, 0.5, -0.5, 0.5], 0.1) == pytest.approx(0.1)
    assert second_moment_bound([], 0.05) == math.inf


def test_the_interpolated_proximal_policy_lies_between_by_version_distance() -> None:
    proximal = proximal_logprobs(
        Proximal.INTERPOLATED,
        current=torch.tensor([-1.0, -1.0, -1.0, math.nan]),
        start=torch.zeros(4),
        behaviour=torch.tensor([-3.0, -3.0, -3.0, -3.0]),
        staleness=torch.tensor([0, 1, 4, 0]),
    )
    torch.testing.assert_close(proximal, torch.tensor([-1.0, -3.0, -1.5, math.nan]), equal_nan=True)


# Objectives --------------------------------------------------------------------------------------


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
