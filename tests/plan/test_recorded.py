"""The profile of a recorded run is what its record says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trajectory_queue.plan.recorded import from_run


def test_a_step_is_a_line_through_its_tokens(tmp_path: Path) -> None:
    """Steps of 1 s and 2 ms a token; half of a group's answers are ten times as long."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {path: none}\ntask: {jsonl: none, reward: 'none:none'}\n"
        "sampling: {group_size: 2}\ntrainer: {batch_groups: 1}\n"
    )
    rows = [
        {
            "kind": "step",
            "step": step,
            "trajectories": 2,
            "untrained_groups": 1,
            "answer_tokens_mean": tokens / 2,
            "tokens_trained": tokens,
            "tokens_per_second": tokens / (1.0 + 0.002 * tokens + 5.5),
            "wait_seconds": 5.0,
            "step_seconds": 1.0 + 0.002 * tokens,
            "publish_seconds": 0.25,
            "answers_sampled": [[(tokens / 11, 1.0), (tokens * 10 / 11, 10.0)]],
        }
        for step, tokens in enumerate((110, 220, 330, 440), start=1)
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    profile = from_run(tmp_path)
    assert profile.trainer.fixed_seconds == pytest.approx(1.0)
    assert profile.trainer.token_seconds == pytest.approx(0.002)
    assert profile.trainer.publish_seconds == pytest.approx(0.25)
    assert profile.trainer.call_seconds == pytest.approx(0.25)
    assert profile.rollouts.no_signal_share == pytest.approx(0.5)
    assert [len(group) for group in profile.rollouts.answers] == [2, 2, 2]
