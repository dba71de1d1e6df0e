"""The domain types: what is refused, and what the wire keeps."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.arrays import array_from_wire, array_to_wire
from leeway.errors import DataError, WireError
from leeway.trajectory import (
    FinishReason,
    Group,
    Purpose,
    Sampling,
    Task,
    Trajectory,
)
from leeway.v1 import trajectory_pb2 as pb
from leeway.versions import VersionSpan, beginning, expand, required_version, spans_of, staleness


def make_task(**changes: Any) -> Task:
    fields: dict[str, Any] = {
        "task_id": "run-7",
        "sequence": 7,
        "messages": ({"role": "user", "content": "2 + 2?"},),
        "columns": {"answer": "4", "nested": {"a": [1, 2.5, None]}},
        "group_size": 2,
        "sampling": Sampling(max_new_tokens=8),
        "seed": 2**63 + 1,
        "purpose": Purpose.EVAL,
        "min_version": 3,
    }
    return Task(**{**fields, **changes})


def make_trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "trajectory_id": "run-7/0",
        "task_id": "run-7",
        "index": 0,
        "token_ids": np.array([5, 6, 7, 8, 9], dtype=np.int32),
        "prompt_length": 2,
        "logprobs": np.array([-0.5, 0.0, -1.5], dtype=np.float32),
        "loss_mask": np.array([True, False, True]),
        "versions": (VersionSpan(3, 2), VersionSpan(4, 1)),
        "finish_reason": FinishReason.STOP,
        "sampling": Sampling(max_new_tokens=8),
        "reward": 1.0,
    }
    return Trajectory(**{**fields, **changes})


def same(a: Trajectory, b: Trajectory) -> bool:
    return a.to_wire().SerializeToString(deterministic=True) == b.to_wire().SerializeToString(
        deterministic=True
    )


def test_a_trajectory_survives_the_wire() -> None:
    trajectory = make_trajectory(extras={"experts": np.arange(6, dtype=np.int16).reshape(2, 3)})
    sent = pb.Trajectory.FromString(trajectory.to_wire().SerializeToString())
    received = Trajectory.from_wire(sent)
    assert same(trajectory, received)
    assert received.extras["experts"].shape == (2, 3)
    assert received.score is None and received.reward == 1.0


def test_a_task_survives_the_wire() -> None:
    task = make_task()
    assert Task.from_wire(pb.Task.FromString(task.to_wire().SerializeToString())) == task


def test_a_group_is_ordered_by_index_on_arrival() -> None:
    group = Group(make_task(), (make_trajectory(), make_trajectory(trajectory_id="b", index=1)))
    message = group.to_wire()
    message.trajectories.reverse()
    assert [t.index for t in Group.from_wire(message).trajectories] == [0, 1]
    with pytest.raises(DataError, match="appears once"):
        Group(make_task(), (make_trajectory(), make_trajectory()))
    with pytest.raises(DataError, match="must belong"):
        Group(make_task(), (make_trajectory(task_id="other"),))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", np.array([-0.5, 0.0], dtype=np.float32)),
        ("logprobs", np.array([-0.5, 0.0, np.nan], dtype=np.float32)),
        ("logprobs", np.array([-0.5, 0.0, -np.inf], dtype=np.float32)),
        ("logprobs", np.array([-0.5, 0.0, -9999.0], dtype=np.float32)),
        ("logprobs", np.array([-0.5, 0.0, 0.5], dtype=np.float32)),
        ("logprobs", np.array([-0.5, 0.0, -1.5], dtype=np.float64)),
        ("loss_mask", np.array([True, False])),
        ("versions", (VersionSpan(3, 2),)),
        ("versions", (VersionSpan(3, 4), VersionSpan(4, -1))),
        ("prompt_length", 0),
        ("prompt_length", 6),
        ("token_ids", np.array([5, 6, 7, 8, -1], dtype=np.int32)),
        ("token_ids", np.array([5, 6, 7, 8, 9], dtype=np.int64)),
        ("reward", float("nan")),
        ("score", float("inf")),
        ("trajectory_id", ""),
    ],
)
def test_what_a_trajectory_may_not_be(field: str, value: Any) -> None:
    with pytest.raises(DataError, match=f"^{field} = "):
        make_trajectory(**{field: value})


def test_a_damaged_array_is_refused() -> None:
    message = pb.Array()
    array_to_wire(np.arange(4, dtype=np.int32), message)
    flipped = pb.Array()
    flipped.CopyFrom(message)
    flipped.data = bytes([message.data[0] ^ 1]) + message.data[1:]
    with pytest.raises(WireError, match="checksum differs"):
        array_from_wire(flipped, "token_ids")
    cut = pb.Array()
    cut.CopyFrom(message)
    cut.data = message.data[:-1]
    with pytest.raises(WireError, match="15 bytes do not make"):
        array_from_wire(cut, "token_ids")
    pickled = pb.Array()
    pickled.CopyFrom(message)
    pickled.dtype = "object"
    with pytest.raises(WireError, match="dtype 'object'"):
        array_from_wire(pickled, "token_ids")


def test_masking_takes_old_tokens_out_of_the_loss() -> None:
    masked = make_trajectory().masked_below(4)
    assert masked.loss_mask.tolist() == [False, False, True]
    assert masked.logprobs.tolist() == [0.0, 0.0, -1.5]
    assert masked.version_range() == (4, 4)
    assert masked.masked_below(5).version_range() is None


def test_a_score_is_the_reward_unless_that_is_shaped() -> None:
    fresh = make_trajectory(reward=None)
    assert (fresh.scored(0.5).score, fresh.scored(0.5).reward) == (0.5, 0.5)
    assert (fresh.scored(0.5, 0.25).score, fresh.scored(0.5, 0.25).reward) == (0.5, 0.25)


@given(st.lists(st.integers(0, 5)))
def test_spans_encode_versions(versions: list[int]) -> None:
    spans = spans_of(versions)
    assert expand(spans).tolist() == versions
    assert all(a.version != b.version for a, b in pairwise(spans))


@given(st.lists(st.integers(0, 5)), st.integers(0, 30))
def test_an_answer_that_is_cut_keeps_the_versions_of_its_beginning(
    versions: list[int], tokens: int
) -> None:
    assert beginning(spans_of(versions), tokens) == spans_of(versions[:tokens])


@given(st.integers(0, 100), st.integers(0, 50), st.integers(0, 50))
def test_staleness_is_in_flight_plus_in_queue(oldest: int, flight: int, queue: int) -> None:
    split = staleness(oldest, oldest + flight, oldest + flight + queue)
    assert (split.in_flight, split.in_queue) == (flight, queue)
    assert split.total == flight + queue


@given(st.integers(0, 50), st.integers(0, 8), st.integers(1, 8))
def test_a_full_pipeline_of_fresh_groups_stays_within_budget(
    version: int, budget: int, batch: int
) -> None:
    """Admitted in turn under the newest weights, no group needs weights that do not exist yet."""
    for outstanding in range((budget + 1) * batch):
        assert required_version(version, outstanding, batch, budget) <= version
    assert required_version(version, (budget + 1) * batch, batch, budget) > version


def test_replace_keeps_validation() -> None:
    with pytest.raises(DataError):
        replace(make_trajectory(), prompt_length=0)
