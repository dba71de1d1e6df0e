"""How much of the trainer's busy time generation goes on, and how many policy versions it mixes.

Runs `leeway up` on SmolLM2-135M-Instruct with a budget of 2 and records what each process did when
(`telemetry.spans`). Overlap is the share of the trainer's learning time during which a node was
generating. It depends on which side is slower: where the trainer is, nodes rightly wait for
admission,
since generating more would only grow staleness. Large models generate slower than they train; the
benchmark models that by a low concurrency, and reports the quickstart's own settings beside it.

    python -m benchmarks.overlap [--steps 10] [--short]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import THREADS, finish, metrics_rows
from leeway import config as configuration

EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
GENERATION_BOUND = ["rollout.concurrency=8"]


def run(seed: int, steps: int, settings: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="leeway-bench-") as name:
        config = configuration.load(
            EXAMPLE,
            [
                f"run.directory={name}",
                f"run.seed={seed}",
                "task.heldout=0",
                "staleness.budget=2",
                f"trainer.steps={steps}",
                "telemetry.spans=true",
                *settings,
            ],
            {},
        )
        file = Path(name) / "run.yaml"
        file.write_text(config.to_yaml())
        subprocess.run(
            [sys.executable, "-m", "leeway.cli", "up", str(file)],
            env={**os.environ, **THREADS},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        path = config.run.path
        learning = spans(path / "spans-trainer.jsonl", "learn")[1:]
        generating = [
            span for file in path.glob("spans-node-*.jsonl") for span in spans(file, "generate")
        ]
        steps_done = [row for row in metrics_rows(path / "metrics.jsonl") if row["kind"] == "step"]
    busy = sum(end - start for start, end in learning)
    return {
        "overlap": sum(covered(span, generating) for span in learning) / busy,
        "trainer_busy": busy / (learning[-1][1] - learning[0][0]),
        "versions_mean": sum(row["versions_in_batch"] for row in steps_done) / len(steps_done),
        "versions_max": max(row["versions_in_batch"] for row in steps_done),
        "staleness_max": max(row["staleness_max"] for row in steps_done),
    }


def spans(path: Path, name: str) -> list[tuple[float, float]]:
    return sorted((row["start"], row["end"]) for row in metrics_rows(path) if row["name"] == name)


def covered(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """Seconds of `span` in which at least one of `others` runs."""
    start, end = span
    seconds = 0.0
    for first, last in sorted(others):
        first, last = max(first, start), min(last, end)
        if last > first:
            seconds += last - first
            start = last
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="a quick, smaller form")
    arguments = parser.parse_args()
    steps = 5 if arguments.short else arguments.steps
    bound = run(arguments.seed, steps, GENERATION_BOUND)
    print("generation-bound:", bound)
    quickstart = {} if arguments.short else run(arguments.seed, steps, [])
    print("quickstart:", quickstart)
    finish(
        arguments.seed,
        steps=steps,
        **bound,
        **{f"quickstart_{name}": value for name, value in quickstart.items()},
    )


if __name__ == "__main__":
    main()
