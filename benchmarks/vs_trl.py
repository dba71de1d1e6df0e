"""CPU-seconds per completion trained, and reward, against TRL's GRPOTrainer.

Both sides train SmolLM2-135M-Instruct in float32 on the same prompts (the quickstart's task) with
the same reward: 4 groups of 4 completions of at most 32 tokens a step, one optimizer step each, the
same learning rate, no KL term. TRL generates with transformers and trains in one process; Leeway
runs as users run it, `leeway up`: queue, Valkey, trainer, broadcaster, node and reward process, all
counted.

Start-up (imports, loading the model) is left out on both sides: the figure is the slope from the
second step to the last. Both run in turn, one thread each. The staleness budget is one version, the
least at which neither side waits for the other.

    python -m benchmarks.vs_trl [--steps 24] [--budget 1] [--short]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import THREADS, TreeClock, finish, metrics_rows
from leeway import config as configuration
from leeway.config import Config

GROUPS, GROUP_SIZE, MAX_TOKENS, LEARNING_RATE = 4, 4, 32, 1e-5
COMPLETIONS = GROUPS * GROUP_SIZE
EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart.yaml"


def make_config(seed: int, steps: int, budget: int, directory: Path) -> Config:
    return configuration.load(
        EXAMPLE,
        [
            "run.name=vs-trl",
            f"run.directory={directory}",
            f"run.seed={seed}",
            "task.heldout=0",
            f"staleness.budget={budget}",
            f"sampling.group_size={GROUP_SIZE}",
            f"sampling.max_new_tokens={MAX_TOKENS}",
            f"trainer.batch_groups={GROUPS}",
            f"trainer.steps={steps}",
            f"trainer.lr={LEARNING_RATE}",
            "trainer.checkpoint_every=1000000",
            # TRL trains on every group it generates; so does Leeway here.
            "queue.filter_equal_scores=false",
        ],
        {},
    )


def run_leeway(config: Config, directory: Path) -> list[dict[str, Any]]:
    """One {cpu, reward} a step."""
    file = directory / "run.yaml"
    file.write_text(config.to_yaml())
    process = subprocess.Popen(
        [sys.executable, "-m", "leeway.cli", "up", str(file)],
        env={**os.environ, **THREADS},
        stdout=subprocess.DEVNULL,
    )
    clock = TreeClock(process.pid)
    points: list[dict[str, Any]] = []
    while process.poll() is None:
        cpu = clock.read()
        rows = metrics_rows(config.run.path / "metrics.jsonl")
        rows = [row for row in rows if row["kind"] == "step"]
        points += [{"cpu": cpu, "reward": row["reward_mean"]} for row in rows[len(points) :]]
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"leeway up ended with {process.returncode}; see {config.run.path}/logs")
    return points


def run_trl(config: Config, directory: Path) -> list[dict[str, Any]]:
    """One {cpu, reward} a step, from a process of its own."""
    out = directory / "trl.json"
    file = directory / "run.yaml"
    file.write_text(config.to_yaml())
    subprocess.run(
        [sys.executable, "-m", "benchmarks.vs_trl", "--trl", str(file), str(out)],
        env={**os.environ, **THREADS, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    points: list[dict[str, Any]] = json.loads(out.read_text())
    return points


def trl_process(file: Path, out: Path) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from leeway import models
    from leeway.tasks import Sampler, open_source
    from rollout_service.sandbox.reward import RewardHost
    from rollout_service.sandbox.work import DEFAULT_REWARD

    config = configuration.load(file)
    steps = config.trainer.steps
    tasks = Sampler(open_source(config), config).take(steps * GROUPS)
    columns = [dict(task.columns) for task in tasks]
    dataset = Dataset.from_dict(
        {
            "prompt": [[dict(message) for message in task.messages] for task in tasks],
            "columns": [json.dumps(row) for row in columns],
        }
    )
    host = RewardHost(config.task.reward or DEFAULT_REWARD, judges={})

    def reward(completions: list[Any], columns: list[str], **_: Any) -> list[float]:
        return [
            host.answer({"completion": completion[0]["content"], "columns": json.loads(row)})[
                "value"
            ]
            for completion, row in zip(completions, columns, strict=True)
        ]

    points: list[dict[str, Any]] = []

    class Record(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "reward" in logs:
                points.append({"cpu": time.process_time(), "reward": logs["reward"]})

    trainer = GRPOTrainer(
        model=str(models.resolve(config.model.path)),
        reward_funcs=reward,
        train_dataset=dataset,
        callbacks=[Record()],
        args=GRPOConfig(
            output_dir=str(out.parent / "trl"),
            use_cpu=True,
            bf16=False,
            use_vllm=False,
            model_init_kwargs={"dtype": "float32"},
            per_device_train_batch_size=COMPLETIONS,
            gradient_accumulation_steps=1,
            num_generations=GROUP_SIZE,
            max_completion_length=MAX_TOKENS,
            max_steps=steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            adam_beta1=config.trainer.betas[0],
            adam_beta2=config.trainer.betas[1],
            temperature=config.sampling.temperature,
            beta=0.0,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            seed=config.run.seed,
        ),
    )
    trainer.train()
    out.write_text(json.dumps(points))


def per_completion(points: list[dict[str, Any]]) -> float:
    first, last = points[1], points[-1]
    spent: float = last["cpu"] - first["cpu"]
    return spent / ((len(points) - 2) * COMPLETIONS)


def quarters(points: list[dict[str, Any]]) -> list[float]:
    """Mean reward of each quarter of the run."""
    parts = np.array_split([point["reward"] for point in points], 4)
    return [round(float(part.mean()), 3) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="a quick, smaller form")
    parser.add_argument("--trl", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trl:
        trl_process(*arguments.trl)
        return
    steps = 6 if arguments.short else arguments.steps
    with tempfile.TemporaryDirectory(prefix="leeway-bench-") as name:
        directory = Path(name)
        config = make_config(arguments.seed, steps, arguments.budget, directory)
        ours = run_leeway(config, directory)
        theirs = run_trl(config, directory)
    for side, points in (("leeway", ours), ("trl", theirs)):
        rewards = " ".join(f"{point['reward']:.2f}" for point in points)
        print(f"{side}: {per_completion(points):.3f} CPU-s a completion; reward {rewards}")
    finish(
        arguments.seed,
        ratio=per_completion(ours) / per_completion(theirs),
        leeway_cpu_seconds_per_completion=per_completion(ours),
        trl_cpu_seconds_per_completion=per_completion(theirs),
        reward_leeway=statistics.mean(point["reward"] for point in ours),
        reward_trl=statistics.mean(point["reward"] for point in theirs),
        quarters_leeway=quarters(ours),
        quarters_trl=quarters(theirs),
        budget=arguments.budget,
        steps=steps,
    )


if __name__ == "__main__":
    main()
