"""Packing loses nothing, computes nothing twice, and does not depend on chance."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.errors import ConfigError, DataError
from leeway.trajectory import Group, Sampling
from tests.trainer.trainer_cases import group, random_groups, trajectory
from trainer_service.balance import Spread
from trainer_service.batching import pack
from trainer_service.packed import ROOT, PackedBatch, Segment, StepPlan


def packed(groups: list[Group], budget: int, *, zero: frozenset[int] = frozenset()) -> StepPlan:
    count = sum(len(g.trajectories) for g in groups)
    weights = np.array([0.0 if i in zero else 1.0 / (1.0 + i) for i in range(count)])
    return pack(groups, 1.0 + np.arange(count), weights, budget)


def context(batch: PackedBatch, row: int) -> list[int]:
    """The tokens that the hidden state at `row` has seen, the root first."""
    index = next(i for i, s in enumerate(batch.segments) if s.start <= row < s.start + s.length)
    segment = batch.segments[index]
    seen = batch.token_ids[segment.start : row + 1].tolist()
    while segment.parent != ROOT:
        segment = batch.segments[segment.parent]
        seen = batch.token_ids[segment.start : segment.start + segment.length].tolist() + seen
    return [int(token) for token in seen]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(1, 5),
    budget=st.integers(1, 80),
    zero=st.frozensets(st.integers(0, 10)),
)
def test_every_trained_token_is_packed_once_behind_its_own_context(
    seed: int, size: int, budget: int, zero: frozenset[int]
) -> None:
    groups = random_groups(seed, groups=3, size=size)
    plan = packed(groups, budget, zero=zero)
    trajectories = [t for g in groups for t in g.trajectories]
    found: dict[int, list[tuple[int, float, int]]] = {}
    for batch in plan.microbatches:
        for n in range(batch.targets.size):
            sequence = int(batch.sequences[n])
            own = trajectories[sequence]
            row = int(batch.rows[batch.predictions[n]])
            before = context(batch, row)
            assert before == own.token_ids[: len(before)].tolist()
            assert batch.positions[row] == len(before) - 1
            assert batch.advantages[n] == np.float32(1.0 + sequence)
            assert batch.weights[n] == np.float32(1.0 / (1.0 + sequence))
            assert batch.temperatures[batch.predictions[n]] == 1.0
            found.setdefault(sequence, []).append(
                (len(before), float(batch.behaviour[n]), int(batch.versions[n]))
            )
            assert batch.targets[n] == own.token_ids[len(before)]
    for sequence, own in enumerate(trajectories):
        trained = np.flatnonzero(own.loss_mask)
        expected = [
            (own.prompt_length + int(i), float(own.logprobs[i]), int(own.token_versions()[i]))
            for i in trained
        ]
        assert found.get(sequence, []) == ([] if sequence in zero else expected)
    assert plan.trained_tokens == sum(t.trained_tokens for t in trajectories)
    assert plan.trajectories == len(trajectories)
    assert plan.packed_tokens == sum(b.token_ids.size for b in plan.microbatches)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 80))
def test_segments_tile_the_batch_within_the_budget(seed: int, budget: int) -> None:
    for batch in packed(random_groups(seed), budget).microbatches:
        ends = np.cumsum([s.length for s in batch.segments])
        assert [s.start for s in batch.segments] == [0, *ends[:-1]]
        assert ends[-1] == batch.token_ids.size == batch.positions.size
        assert all(s.length > 0 and s.parent < i for i, s in enumerate(batch.segments))
        alone = np.unique(batch.sequences).size == 1
        assert batch.token_ids.size <= budget or alone


def test_the_same_groups_give_the_same_batches() -> None:
    first, second = (packed(random_groups(7), 40).microbatches for _ in range(2))
    assert len(first) == len(second) > 1
    for one, other in zip(first, second, strict=True):
        for name in (f.name for f in fields(PackedBatch)):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_a_shared_prompt_is_computed_once_and_nothing_behind_the_last_trained_token() -> None:
    prompt = list(range(10))
    one = trajectory(prompt, [14, 15, 16], index=0)
    other = trajectory(prompt, [17, 18, 19, 20], index=1, mask=[True, True, False, False])
    (batch,) = packed([group([one, other])], 100).microbatches
    assert batch.token_ids.tolist() == [*prompt, 14, 15, 17]
    assert batch.positions.tolist() == [*prompt, 10, 11, 10]
    assert batch.segments == (Segment(0, 10), Segment(10, 2, 0), Segment(12, 1, 0))
    assert batch.rows[batch.predictions].tolist() == [9, 10, 11, 9, 12]
    assert batch.rows.tolist() == [9, 10, 11, 12]
    assert batch.targets.tolist() == [14, 15, 16, 17, 18]


def test_equal_beginnings_are_shared_across_groups_and_within_answers() -> None:
    system = list(range(10))
    groups = [
        group([trajectory([*system, 11], [20, *range(30, 34)], index=i) for i in range(2)]),
        group(
            [
                trajectory([*system, 12], [*range(20, 29), 1, 2], task="t1", index=0),
                trajectory([*system, 12], [*range(20, 29), 3, 4], task="t1", index=1),
            ]
        ),
    ]
    (batch,) = packed(groups, 100).microbatches
    assert batch.segments == (
        Segment(0, 10),
        Segment(10, 5, 0),
        Segment(15, 10, 0),
        Segment(25, 1, 2),
        Segment(26, 1, 2),
    )
    assert batch.token_ids.tolist() == [*system, 11, 20, 30, 31, 32, 12, *range(20, 29), 1, 3]


def test_a_short_common_beginning_is_not_worth_a_segment() -> None:
    members = [trajectory([1, 2, 3], [i, 9, 8], index=i) for i in range(2)]
    (batch,) = packed([group(members)], 100).microbatches
    assert batch.segments == (Segment(0, 5), Segment(5, 5))


def test_an_answer_of_one_token_adds_no_token() -> None:
    members = [trajectory([1, 2], [token], index=i) for i, token in enumerate((3, 4))]
    (batch,) = packed([group(members)], 100).microbatches
    assert batch.token_ids.tolist() == [1, 2]
    assert batch.rows.tolist() == [1]
    assert batch.predictions.tolist() == [0, 0]


def test_trajectories_that_cannot_move_the_weights_are_counted_but_not_computed() -> None:
    members = [
        trajectory([1, 2], [3, 4], index=0),
        trajectory([1, 2], [5, 6], index=1, mask=[False, False]),
        trajectory([1, 2], [7, 8], index=2),
    ]
    plan = packed([group(members)], 100, zero=frozenset({2}))
    assert (plan.trajectories, plan.packed_trajectories, plan.trained_tokens) == (2, 1, 4)
    assert [b.sequences.tolist() for b in plan.microbatches] == [[0, 0]]
    assert packed([group(members)], 100, zero=frozenset({0, 1, 2})).microbatches == ()


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(top_p=0.9), Sampling(top_k=50)]
)
def test_sampling_that_the_trainer_cannot_follow_is_refused(sampling: Sampling) -> None:
    members = [trajectory([1], [2], index=i, sampling=sampling) for i in range(2)]
    with pytest.raises(ConfigError, match=r"sampling\.(temperature|top_p)"):
        packed([group(members)], 100)


def test_arrays_must_list_the_trajectories() -> None:
    groups = [group([trajectory([1], [2])])]
    with pytest.raises(DataError, match="advantages"):
        pack(groups, np.ones(2), np.ones(1), 10)
    with pytest.raises(DataError, match="weights"):
        pack(groups, np.ones(1), np.array([np.nan]), 10)


def test_a_group_is_shared_out_when_ranks_would_be_idle() -> None:
    (only,) = random_groups(1, groups=1, size=8)
    count = len(only.trajectories)
    alone = pack([only], np.ones(count), np.ones(count), 1000).microbatches
    shared = pack([only], np.ones(count), np.ones(count), 1000, Spread(4)).microbatches
    assert len(alone) == 1
    assert len(shared) == 4
    assert sorted(t for b in shared for t in set(b.sequences.tolist())) == list(range(count))
