"""The example agent, in short: two optimizer steps through the gateway, with the real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from leeway import models
from leeway.view import read_group

ROOT = Path(__file__).parents[2]
SHORT = ["trainer.steps=2", "trainer.batch_groups=2", "sampling.group_size=4", "task.heldout=0"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_turns_and_a_tool_train(tmp_path: Path) -> None:
    if not (models.cache_directory() / "models" / "smollm2-135m-instruct").is_dir():
        pytest.skip("SmolLM2 is not here; `make quickstart` fetches it")
    done = subprocess.run(
        [sys.executable, "-m", "leeway.cli", "up", "examples/calculator_agent.yaml",
         f"run.directory={tmp_path}", *SHORT],
        cwd=ROOT, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "calculator"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(0.0 < row["reward_mean"] <= 1.0 for row in steps)
    trajectories = [
        t
        for file in sorted((run / "trajectories").glob("*.pb"))
        for t in read_group(file).trajectories
    ]
    called = [t for t in trajectories if t.reward_parts["well_formed"]]
    assert called, "the model calls the calculator about every second time"
    for trajectory in called:
        # The calculator's answer lies between two answers of the model, and is not trained.
        turns = np.count_nonzero(np.diff(trajectory.loss_mask.astype(int), prepend=0) == 1)
        assert turns == 2
        assert trajectory.branch_starts == ()
        assert trajectory.score == pytest.approx(0.2 + 0.8 * trajectory.reward_parts["right"])
