"""How well `leeway plan --from` predicts: runs over the real queue service, and their simulation.

Each run is played by simulated nodes and trainer in real time, or is a real one (`leeway up` with a
tiny model on CPUs); its profile is then taken from what it recorded, as a user would, and simulated
at the same budget. Other runs are added by name: every directory of `--runs` that holds config.yaml
and metrics.jsonl.

    throughput_error_max  of trained tokens a second, relative; the worst run
    staleness_error_max   of the mean staleness of trained tokens, in versions; the worst run

    python -m benchmarks.plan_prediction [--steps 16] [--real-steps 40] [--at-once 3] [--short]
                                         [--cases CASE ...] [--runs RUN ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.common import THREADS, finish, metrics_rows
from benchmarks.played import Figures, measure, play
from tests import tiny
from trajectory_queue.plan.profile import LogNormal, Profile, Rollouts, Trainer
from trajectory_queue.plan.recorded import from_run
from trajectory_queue.plan.simulation import simulate

# The simulated nodes look for new weights twenty times a second.
UPDATE_SECONDS = 0.05
BASE = Profile(
    group_size=4,
    batch_groups=8,
    rollouts=Rollouts(
        nodes=4,
        concurrency=16,
        answer_tokens=LogNormal(median=80.0, sigma=0.6, longest=400.0),
        token_seconds=0.025,
        update_seconds=UPDATE_SECONDS,
    ),
    trainer=Trainer(fixed_seconds=1.0, token_seconds=0.0005),
)
HEAVY_TAIL = {"rollouts.answer_tokens.sigma": 1.0}
FEW_SLOTS = {"rollouts.nodes": 2}
TOOLS = {"rollouts.tool_calls": 3, "rollouts.tool_seconds": {"median": 0.5, "sigma": 1.0}}
CASES: Mapping[str, Mapping[str, object]] = {
    "sync": {"budget": 0},
    "one-step": {"budget": 1},
    "budget-2": {"budget": 2},
    "budget-4": {"budget": 4},
    "tail-sync": {"budget": 0, **HEAVY_TAIL},
    "tail-one-step": {"budget": 1, **HEAVY_TAIL},
    "tail-4": {"budget": 4, **HEAVY_TAIL},
    "few-slots-1": {"budget": 1, **FEW_SLOTS},
    "few-slots-4": {"budget": 4, **FEW_SLOTS, **HEAVY_TAIL},
    "tools-2": {"budget": 2, **TOOLS},
    "slow-trainer": {"budget": 2, "trainer.fixed_seconds": 3.0},
    "streaming": {"budget": 2, "streaming": True, **HEAVY_TAIL},
    "failures": {"budget": 2, "rollouts.failure_share": 0.02},
    "crowded": {"budget": 2, **FEW_SLOTS, "rollouts.slowdown": 0.03},
}
# Real runs, one after the other: each has the machine for itself.
REAL: Mapping[str, Sequence[str]] = {
    "real-sync": ("staleness.budget=0",),
    "real-1": ("staleness.budget=1",),
    "real-2": ("staleness.budget=2", "rollout.concurrency=16"),
}
REWARD = """
def reward(completion, **columns):
    return sum(character in "aeiou" for character in completion) / 96
"""
SHORT = ("sync", "tail-4", "few-slots-1")


def record(name: str, directory: Path, steps: int, seed: int) -> None:
    profile = BASE.where(**CASES[name])
    asyncio.run(play(profile, directory, name, steps + 2 * profile.budget + 2, seed))


def record_real(name: str, directory: Path, steps: int, seed: int) -> None:
    """A run of both clusters on this machine, with a model of 0.1 M parameters."""
    directory.mkdir(parents=True, exist_ok=True)
    model, rows = directory / "model", directory / "rows.jsonl"
    if not model.exists():
        tiny.build(model)
    prompts = [{"prompt": f"say {word}", "answer": word} for word in "abcdefghijklmnopqrstuvwxyz"]
    rows.write_text("\n".join(json.dumps(row) for row in prompts))
    (directory / "rewards.py").write_text(REWARD)
    settings = {
        "run": {"name": name, "directory": str(directory), "seed": seed},
        "model": {"path": str(model)},
        "task": {"jsonl": str(rows), "reward": f"{directory / 'rewards.py'}:reward"},
        "sampling": {"group_size": 8, "max_new_tokens": 96},
        "trainer": {"batch_groups": 8, "steps": steps, "lr": 1e-4, "checkpoint_every": 1000},
    }
    file = directory / f"{name}.yaml"
    file.write_text(json.dumps(settings))
    subprocess.run(
        [sys.executable, "-m", "leeway.cli", "up", str(file), *REAL[name]],
        env={**os.environ, **THREADS},
        stdout=subprocess.DEVNULL,
        check=True,
    )


def compare(run: Path) -> tuple[float, float]:
    """The errors of throughput and staleness, of a run against its own profile's simulation."""
    profile = from_run(run, update_seconds=UPDATE_SECONDS)
    rows = [row for row in metrics_rows(run / "metrics.jsonl") if row["kind"] == "step"]
    seen: Figures = measure(rows, profile.budget)
    said = simulate(profile, steps=200)
    throughput = said.tokens_per_second / seen.tokens_per_second - 1.0
    staleness = said.staleness_mean - seen.staleness_mean
    print(
        f"{run.name:15} tokens/s {seen.tokens_per_second:8.1f}, said {said.tokens_per_second:8.1f} "
        f"({throughput:+.1%}); staleness {seen.staleness_mean:.2f}, said "
        f"{said.staleness_mean:.2f} ({staleness:+.2f}); trainer busy {seen.trainer_busy:.1%}, said "
        f"{said.trainer_busy:.1%}",
        flush=True,
    )
    return abs(throughput), abs(staleness)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=3, help="runs that share the machine")
    parser.add_argument("--short", action="store_true", help="a quick, smaller form")
    parser.add_argument("--real-steps", type=int, default=40, help="of the real runs")
    parser.add_argument("--cases", nargs="*", choices=[*CASES, *REAL], default=[*CASES, *REAL])
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="of real models")
    parser.add_argument("--keep", type=Path, help="leave the runs here")
    arguments = parser.parse_args()
    names = list(SHORT if arguments.short else arguments.cases)
    with tempfile.TemporaryDirectory(prefix="leeway-bench-") as temporary:
        directory = arguments.keep or Path(temporary)
        with ProcessPoolExecutor(arguments.at_once, mp_context=get_context("spawn")) as pool:
            recorded = [
                pool.submit(record, name, directory, arguments.steps, arguments.seed)
                for name in names
                if name in CASES
            ]
            for run in recorded:
                run.result()
        for name in names:
            if name in REAL:
                record_real(name, directory, arguments.real_steps, arguments.seed)
        errors = [compare(run) for run in [directory / name for name in names] + arguments.runs]
    finish(
        arguments.seed,
        runs=len(errors),
        throughput_error_max=round(max(error for error, _ in errors), 4),
        staleness_error_max=round(max(error for _, error in errors), 3),
    )


if __name__ == "__main__":
    main()
