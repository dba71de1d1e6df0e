"""Policy losses and off-policy corrections against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from leeway.algorithm import (
    BoundAction,
    KlEstimator,
    Level,
    PolicyConfig,
    PolicyLoss,
    Proximal,
    RejectConfig,
    RejectLevel,
    WeightConfig,
)
from trainer_service.algorithms.correction import (
    behaviour_weights,
    proximal_logprobs,
    rejected,
    second_moment_bound,
)
from trainer_service.algorithms.policy_loss import TokenLosses, token_losses
from trainer_service.algorithms.tokens import Sequences


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
