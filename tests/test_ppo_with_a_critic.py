"""PPO with a critic through the real trainer: it learns, first alone where asked to, and resumes
bit by bit; also where both models are cut."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForTokenClassification

from tests import tiny
from tests.test_killed_trainer import started, trainers
from tests.test_up import SECONDS, Run
from tests.waiting import gone, until

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
    "rollout.engine.deterministic=true",
    "trainer.checkpoint_every=4",
    f"trainer.steps={STEPS}",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("model"))


def prepared(directory: Path, model: Path) -> Run:
    directory.mkdir()
    run = Run(directory, model)
    (directory / "rewards.py").write_text(REWARD)
    return run


def straight_and_killed(
    tmp_path: Path, model: Path, kill_after: int, *settings: str
) -> tuple[Run, Run]:
    """Two finished runs, one of which lost its trainer when so many steps were recorded."""
    runs = []
    for name in ("straight", "killed"):
        runs.append(run := prepared(tmp_path / name, model))
        with started(run, *settings) as process:
            if name == "killed":
                until(
                    lambda run=run: len(run.steps()) >= kill_after, "its steps", SECONDS, run.said
                )
                victims = trainers(process)
                victims[0].send_signal(signal.SIGKILL)
                until(lambda v=victims: gone(v), "its end", SECONDS, run.said)
            assert process.wait(120) == 0, run.said()
    return runs[0], runs[1]


def tensors(run: Run, step: int, file: str) -> dict[str, Tensor]:
    return load_file(run.path / "checkpoints" / f"step-{step:06d}" / file)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.slow
def test_the_value_loss_falls_and_a_killed_run_ends_with_the_same_weights(
    tmp_path: Path, model: Path
) -> None:
    runs = straight_and_killed(tmp_path, model, 10, *PPO)
    straight, killed = (run.path / "checkpoints" / f"step-{STEPS:06d}" for run in runs)
    named = json.loads((straight / "manifest.json").read_text())["files"]
    assert sorted(named) == [
        "critic/optimizer.safetensors",
        "critic/weights.safetensors",
        "optimizer.safetensors",
        "weights.safetensors",
    ]
    for name in named:
        assert same(load_file(straight / name), load_file(killed / name)), name
    rows = runs[0].steps()
    losses = [row["value_loss_mean"] for row in rows]
    assert np.mean(losses[-5:]) < 0.1 * losses[0]
    # It begins with 0, and has come to know about what there is to earn.
    assert rows[0]["value_mean"] == 0.0 and rows[0]["return_mean"] > 0.5
    assert rows[-1]["value_mean"] == pytest.approx(rows[-1]["return_mean"], abs=0.3)
    critic = AutoModelForTokenClassification.from_pretrained(runs[0].path / "checkpoints/critic")
    assert critic.num_labels == 1
    trained = tensors(runs[0], STEPS, "critic/weights.safetensors")
    for name, values in critic.state_dict().items():
        assert values.equal(trained[name].bfloat16()), name


@pytest.mark.slow
def test_first_the_critic_learns_alone_also_in_a_life_that_resumes(
    tmp_path: Path, model: Path
) -> None:
    warm, steps = 6, 9
    settings = (
        *(f"trainer.steps={steps}", f"trainer.critic.warmup_batches={warm}"),
        *("trainer.checkpoint_every=2", "trainer.checkpoints_kept=9"),
    )
    straight, killed = straight_and_killed(tmp_path, model, 3, *PPO, *settings)
    for run in (straight, killed):
        # Versions go up by one a batch, and nodes follow: nothing is older than the budget of 0.
        summary = run.summary()
        assert (summary["versions"], summary["lost"], summary["twice"]) == (steps, 0, 0)
        assert summary["staleness_max"] == 0
        weights = [tensors(run, step, "weights.safetensors") for step in (2, 4, warm, 8)]
        assert all(same(weights[0], still) for still in weights[1:3])
        assert not same(weights[0], weights[3])
        critics = [tensors(run, step, "critic/weights.safetensors") for step in (2, 4, warm)]
        assert not same(critics[0], critics[1]) and not same(critics[1], critics[2])
        # The policy's optimizer, and so its learning rate's own warm-up, begins behind it.
        counts = [
            int(tensors(run, warm, f"{part}optimizer.safetensors")["steps"])
            for part in ("", "critic/")
        ]
        assert counts == [0, warm]
        by_step = {row["step"]: row for row in run.steps()}
        assert all(by_step[step]["lr"] == by_step[step]["grad_norm"] == 0 for step in range(1, 7))
        assert all(by_step[step]["lr"] > 0 for step in range(7, steps + 1))
        assert not any("effective_sample_size" in by_step[step] for step in range(1, 7))
        assert "effective_sample_size" in by_step[7]
    again = [row["step"] for row in killed.steps()]
    assert len(again) > len(set(again)) and max(s for s in again if again.count(s) > 1) <= warm
    for file in ("weights.safetensors", "critic/weights.safetensors"):
        assert same(tensors(straight, steps, file), tensors(killed, steps, file)), file


@pytest.mark.slow
def test_a_cut_critic_goes_on_in_another_layout(tmp_path: Path, model: Path) -> None:
    pytest.importorskip("megatron.core")
    run = prepared(tmp_path / "run", model)
    cut = ("trainer.backend=megatron", "trainer.ranks=2")
    with started(run, *PPO, *cut, "trainer.layout=pp=2", "trainer.steps=1000") as process:
        until(lambda: len(run.steps()) >= 3, "steps of pipeline stages", SECONDS, run.said)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, run.said()
    newest = (run.path / "checkpoints" / "LATEST").read_text()
    stopped_at = int(newest.removeprefix("step-"))
    steps = stopped_at + 3
    with started(run, *PPO, *cut, "trainer.layout=tp=2", f"trainer.steps={steps}") as process:
        assert process.wait(120) == 0, run.said()
    summary = run.summary()
    assert (summary["versions"], summary["lost"], summary["twice"]) == (steps, 0, 0)
    rows = run.steps()
    assert rows[0]["value_mean"] == 0.0 < rows[-1]["value_mean"]
    critic = AutoModelForTokenClassification.from_pretrained(run.path / "checkpoints/critic")
    assert critic.score.weight.any()
