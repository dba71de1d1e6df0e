"""A trainer that is killed at any moment resumes as if nothing had happened.

`LEEWAY_KILLS` is how often a run's trainer is killed: a few times here, 20 by `make kill-trainer`.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.test_up import SECONDS, Run
from tests.waiting import children, gone, kill, until

KILLS = int(os.environ.get("LEEWAY_KILLS", "3"))
STEPS = 4 + 3 * KILLS
# The supervisor gives up on a process that dies again and again; here it dies for another reason.
UP = (
    "import sys, leeway.local; leeway.local.MAX_RESTARTS = 1000; "
    "from leeway.cli import main; sys.argv[0] = 'leeway'; main()"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("model"))


@contextmanager
def started(run: Run, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    with run.output.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", UP, "up", str(run.config), *overrides],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(run.temporary)},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def trainers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The trainer's processes: one, or torchrun's ranks."""
    return children(
        process.pid,
        lambda command: "trainer" in command and "torch.distributed.run" not in command,
    )


def kill_now_and_then(run: Run, process: subprocess.Popen[bytes], seed: int) -> set[int]:
    """Kills one of the trainer's processes `KILLS` times: at any moment of its start, or of the
    steps that it takes then.

    Returns:
        How many steps were recorded at each.
    """
    moments = random.Random(seed)
    met = set()
    for _ in range(KILLS):
        until(lambda: trainers(process), "a trainer", SECONDS, run.said)
        lives = moments.randrange(3)
        if lives:
            reached = len(run.steps()) + lives
            until(
                lambda reached=reached: len(run.steps()) >= reached, "its steps", SECONDS, run.said
            )
            time.sleep(moments.uniform(0.0, 0.5))
        else:
            time.sleep(moments.uniform(0.2, 5.0))
        victims = trainers(process)
        met.add(len(run.steps()))
        kill([moments.choice(victims)])
        until(lambda v=victims: gone(v), "its end", SECONDS, run.said)
    return met


def weights(run: Run) -> dict[str, torch.Tensor]:
    directory = run.path / "checkpoints" / f"step-{STEPS:06d}"
    return {
        name: tensor
        for path in directory.glob("weights*.safetensors")
        for name, tensor in load_file(path).items()
    }


@pytest.mark.slow
@pytest.mark.timeout(120 + 60 * KILLS)
def test_in_sync_mode_the_weights_are_those_of_an_uninterrupted_run(
    tmp_path: Path, model: Path
) -> None:
    settings = [
        "staleness.budget=0",
        "rollout.engine.deterministic=true",
        f"trainer.steps={STEPS}",
        "trainer.checkpoint_every=3",
    ]
    trained = []
    for name in ("straight", "killed"):
        directory = tmp_path / name
        directory.mkdir()
        run = Run(directory, model)
        with started(run, *settings) as process:
            if name == "killed":
                assert len(kill_now_and_then(run, process, seed=1)) > 1
            assert process.wait(60 + 60 * KILLS) == 0, run.said()
        summary = run.summary()
        assert (summary["versions"], summary["lost"], summary["twice"]) == (STEPS, 0, 0)
        trained.append(weights(run))
    straight, killed = trained
    assert straight.keys() == killed.keys()
    assert [name for name in straight if not torch.equal(straight[name], killed[name])] == []


@pytest.mark.slow
@pytest.mark.timeout(120 + 60 * KILLS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_in_async_mode_nothing_is_lost_or_trained_twice(
    ranks: int, tmp_path: Path, model: Path
) -> None:
    """With two ranks torchrun's agent ends the other one, and the run goes on with two new ones."""
    run = Run(tmp_path, model)
    with started(run, f"trainer.steps={STEPS}", f"trainer.ranks={ranks}") as process:
        kill_now_and_then(run, process, seed=2)
        assert process.wait(60 + 60 * KILLS) == 0, run.said()
    summary = run.summary()
    assert (summary["versions"], summary["lost"], summary["twice"]) == (STEPS, 0, 0)
    assert summary["staleness_max"] <= 2
