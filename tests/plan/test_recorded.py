"""The profile of a recorded run is what its record says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from trajectory_queue.plan.profile import Profile
from trajectory_queue.plan.recorded import from_run
from trajectory_queue.plan.simulation import simulate


def recorded(directory: Path, rows: Sequence[Mapping[str, object]], settings: str) -> Profile:
    """The profile of a run whose steps wrote `rows`."""
    (directory / "config.yaml").write_text(
        "model: {path: none}\ntask: {jsonl: none, reward: 'none:none'}\n"
        "sampling: {group_size: 2}\n" + settings
    )
    lines = [
        json.dumps({"kind": "step", "step": step, "publish_seconds": 0.25, **row}) + "\n"
        for step, row in enumerate(rows, start=1)
    ]
    (directory / "metrics.jsonl").write_text("".join(lines))
    return from_run(directory)


def test_a_step_is_a_line_through_its_tokens(tmp_path: Path) -> None:
    """Steps of 1 s and 2 ms a token; half of a group's answers are ten times as long."""
    rows = [
        {
            "trajectories": 2,
            "untrained_groups": 1,
            "answer_tokens_mean": tokens / 2,
            "tokens_trained": tokens,
            "tokens_per_second": tokens / (1.0 + 0.002 * tokens + 5.5),
            "wait_seconds": 5.0,
            "step_seconds": 1.0 + 0.002 * tokens,
            "answers_sampled": [[(tokens / 11, 1.0), (tokens * 10 / 11, 10.0)]],
        }
        for tokens in (110, 220, 330, 440)
    ]
    profile = recorded(tmp_path, rows, "trainer: {batch_groups: 1}\n")
    assert profile.trainer.fixed_seconds == pytest.approx(1.0)
    assert profile.trainer.token_seconds == pytest.approx(0.002)
    assert profile.trainer.publish_seconds == pytest.approx(0.25)
    assert profile.trainer.call_seconds == pytest.approx(0.25)
    assert profile.rollouts.no_signal_share == pytest.approx(0.5)
    assert [len(group) for group in profile.rollouts.answers] == [2, 2, 2]


def test_a_run_in_step_is_predicted_whatever_slows_whole_batches(tmp_path: Path) -> None:
    """Batches of three groups take 1 or 4 s; 0.3 s pass around them. Groups drawn one by one would
    put a slow one into most batches."""
    seconds = [1.0, 4.0, 1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 4.0]
    rows = [
        {
            "trajectories": 6,
            "untrained_groups": 0,
            "answer_tokens_mean": 10.0,
            "tokens_trained": 60,
            "tokens_per_second": 60 / (longest + 0.3 + 0.5 + 0.25),
            "wait_seconds": longest + 0.3,
            "step_seconds": 0.5,
            "answers_sampled": [[(10, longest), (10, longest / 2)]] * 3,
        }
        for longest in seconds
    ]
    profile = recorded(tmp_path, rows, "trainer: {batch_groups: 3}\nstaleness: {budget: 0}\n")
    assert profile.trainer.call_seconds == pytest.approx(0.3)
    mean = sum(seconds[1:]) / len(seconds[1:]) + 0.3 + 0.5 + 0.25
    assert simulate(profile, steps=400).tokens_per_second == pytest.approx(60 / mean, rel=0.05)
