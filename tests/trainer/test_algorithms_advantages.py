"""Advantages, by trajectory and by turn, against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from leeway.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    Baseline,
    Normalise,
)
from leeway.errors import DataError
from tests.trainer.trainer_cases import group, random_groups, trajectory
from trainer_service.algorithms.advantages import group_relative, overlong_penalty, whiten
from trainer_service.algorithms.critic import gae, turn_steps, value_loss
from trainer_service.algorithms.plan import TURN_REWARDS, plan_step

CENTRED = AdvantageConfig(normalise=Normalise.NONE)


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
