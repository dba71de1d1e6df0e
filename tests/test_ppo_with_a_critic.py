"""PPO with a critic through the real trainer: it learns, and resumes bit by bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests import tiny
from tests.test_killed_trainer import started, trainers
from tests.test_up import Run, gone, until

STEPS = 30
REWARD = """
def reward(completion, **columns):
    return 1 + sum(character in "aeiou" for character in completion) / 12
"""
PPO = [
    "trainer.algorithm.advantage={baseline: critic, normalise: batch, gae: {lam: 0.95}}",
    "trainer.critic.lr=3e-3",
    "trainer.lr=3e-4",
    "queue.filter_equal_scores=false",
    "staleness.budget=0",
    "trainer.checkpoint_every=4",
    f"trainer.steps={STEPS}",
]


@pytest.mark.slow
def test_the_value_loss_falls_and_a_killed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    model = tiny.build(tmp_path / "model")
    runs = []
    for name in ("straight", "killed"):
        directory = tmp_path / name
        directory.mkdir()
        runs.append(run := Run(directory, model))
        (directory / "rewards.py").write_text(REWARD)
        with started(run, *PPO) as process:
            if name == "killed":
                until(lambda run=run: len(run.steps()) > 9, "ten steps", run)
                victims = trainers(process)
                victims[0].send_signal(signal.SIGKILL)
                until(lambda victims=victims: gone(victims), "its end", run)
            assert process.wait(120) == 0, run.said()
    straight, killed = (run.path / "checkpoints" / f"step-{STEPS:06d}" for run in runs)
    named = json.loads((straight / "manifest.json").read_text())["files"]
    assert sorted(named) == [
        "critic/optimizer.safetensors",
        "critic/weights.safetensors",
        "optimizer.safetensors",
        "weights.safetensors",
    ]
    for name in named:
        one, other = load_file(straight / name), load_file(killed / name)
        assert one.keys() == other.keys()
        assert [key for key in one if not one[key].equal(other[key])] == []
    rows = runs[0].steps()
    losses = [row["value_loss_mean"] for row in rows]
    assert np.mean(losses[-5:]) < 0.1 * losses[0]
    # It begins with 0, and has come to know about what there is to earn.
    assert rows[0]["value_mean"] == 0.0 and rows[0]["return_mean"] > 0.5
    assert rows[-1]["value_mean"] == pytest.approx(rows[-1]["return_mean"], abs=0.3)
