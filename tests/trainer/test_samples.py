"""What is recorded of a token's training lies at that token, also where sequences branch."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from leeway.trajectory import Group, Trajectory
from tests.trainer.test_branches import TASK, trajectories
from trainer_service.batching import pack
from trainer_service.samples import annotated


@settings(max_examples=100, deadline=None)
@given(trajectories())
def test_advantages_and_ratios_are_at_their_tokens(given: list[Trajectory]) -> None:
    weights = np.ones(len(given))
    advantages = [np.arange(t.trained_tokens, dtype=np.float64) for t in given]
    group = Group(TASK, tuple(given))
    plan = pack([group], advantages, weights, 64)
    scored = [(batch, batch.behaviour + batch.advantages) for batch in plan.microbatches]
    for before, after in zip(given, annotated(group, scored).trajectories, strict=True):
        if not before.trained_tokens:
            assert not after.extras
            continue
        expected = np.full(before.response_length, np.nan, dtype=np.float32)
        expected[before.loss_mask] = np.arange(before.trained_tokens)
        assert np.array_equal(after.extras["advantages"], expected, equal_nan=True)
        assert np.allclose(after.extras["log_ratios"], expected, atol=1e-4, equal_nan=True)
