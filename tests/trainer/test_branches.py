"""Trajectories of several turns and branches are trained as what they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.errors import DataError
from leeway.trajectory import FinishReason, Group, Sampling, Task, Trajectory
from leeway.versions import spans_of
from trainer_service.batching import pack

TASK = Task("t", 0, ({"role": "user", "content": "x"},), {}, 2, Sampling(), 0)


def build(index: int, prompt: list[int], branches: list[list[tuple[int, bool]]]) -> Trajectory:
    """Branches of (token, whether it was sampled); the first goes on from the prompt."""
    tokens = prompt + [token for branch in branches for token, _ in branch]
    mask = np.array([sampled for branch in branches for _, sampled in branch])
    lengths = [len(prompt) + len(branches[0]), *map(len, branches[1:])]
    rng = np.random.default_rng(index)
    logprobs = np.where(mask, -rng.random(mask.size), 0.0).astype(np.float32)
    return Trajectory(
        trajectory_id=f"t/{index}",
        task_id="t",
        index=index,
        token_ids=np.array(tokens, dtype=np.int32),
        prompt_length=len(prompt),
        logprobs=logprobs,
        loss_mask=mask,
        versions=spans_of(rng.integers(0, 3, mask.size)),
        finish_reason=FinishReason.STOP,
        sampling=Sampling(),
        reward=1.0,
        score=0.5,
        reward_parts={"format": 0.25},
        branch_starts=tuple(int(start) for start in np.cumsum(lengths)[:-1]),
    )


TOKEN = st.tuples(st.integers(0, 3), st.booleans())
BRANCH = st.lists(TOKEN, min_size=1, max_size=12)


@st.composite
def trajectories(draw: st.DrawFn) -> list[Trajectory]:
    result = []
    for index in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
        first, *others = draw(st.lists(BRANCH, min_size=1, max_size=4))
        others = [[(token, False), *rest] for (token, _), *rest in others]
        result.append(build(index, prompt, [first, *others]))
    return result


@settings(max_examples=300, deadline=None)
@given(trajectories(), st.integers(8, 120))
def test_every_sampled_token_is_predicted_from_its_own_branch(
    given: list[Trajectory], budget: int
) -> None:
    weights = np.full(len(given), 0.5)
    advantages = [np.arange(t.trained_tokens, dtype=np.float64) for t in given]
    plan = pack([Group(TASK, tuple(given))], advantages, weights, budget)
    seen: dict[int, list[tuple[tuple[int, ...], int, float, int, float]]] = {}
    places: dict[int, set[int]] = {}
    for number, batch in enumerate(plan.microbatches):
        for i, target in enumerate(batch.targets.tolist()):
            row = int(batch.rows[batch.predictions[i]])
            # What the row attends to: its segment up to it, and the segments it continues.
            context: list[int] = []
            index = next(
                k for k, s in enumerate(batch.segments) if s.start <= row < s.start + s.length
            )
            end = row + 1
            while index >= 0:
                segment = batch.segments[index]
                context = batch.token_ids[segment.start : end].tolist() + context
                index = segment.parent
                end = batch.segments[index].start + batch.segments[index].length
            assert batch.positions[row] == len(context) - 1
            sequence = int(batch.sequences[i])
            places.setdefault(sequence, set()).add(number)
            seen.setdefault(sequence, []).append(
                (
                    tuple(context),
                    target,
                    float(batch.behaviour[i]),
                    int(batch.versions[i]),
                    float(batch.advantages[i]),
                )
            )
    for sequence, trajectory in enumerate(given):
        expected = []
        versions = trajectory.token_versions()
        rank = 0
        for branch in trajectory.branches():
            for place in range(branch.start, branch.stop):
                own = place - trajectory.prompt_length
                if own >= 0 and trajectory.loss_mask[own]:
                    context = tuple(trajectory.token_ids[branch.start : place].tolist())
                    token = int(trajectory.token_ids[place])
                    logprob = float(trajectory.logprobs[own])
                    expected.append((context, token, logprob, int(versions[own]), float(rank)))
                    rank += 1
        assert sorted(seen.get(sequence, [])) == sorted(expected)
        assert len(places.get(sequence, {0})) == 1, "a trajectory is never split"


def test_a_trajectory_survives_the_wire_whole() -> None:
    sent = build(0, [1, 2], [[(3, True)], [(1, False), (2, True)]])
    got = Trajectory.from_wire(sent.to_wire())
    assert got.branch_starts == sent.branch_starts == (3,)
    assert got.reward_parts == {"format": 0.25}
    assert [sent.token_ids[b].tolist() for b in got.branches()] == [[1, 2, 3], [1, 2]]


@pytest.mark.parametrize("starts", [(2,), (5,), (4, 4), (1,)])
def test_branches_that_cannot_be_are_refused(starts: tuple[int, ...]) -> None:
    whole = build(0, [1, 2], [[(3, True), (1, False), (2, True)]])
    with pytest.raises(DataError, match="branch_starts"):
        replace(whole, branch_starts=starts)


def test_a_branch_s_first_token_cannot_be_trained() -> None:
    whole = build(0, [1, 2], [[(3, True), (1, True), (2, True)]])
    with pytest.raises(DataError, match="first token"):
        replace(whole, branch_starts=(3,))
