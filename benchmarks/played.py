"""Profiles of `leeway plan`, played over the real queue service by simulated nodes and trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import metrics_rows
from leeway.algorithm import AdvantageConfig, AlgorithmConfig, Baseline, Normalise
from leeway.config import (
    Config,
    ModelConfig,
    QueueConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    StalenessConfig,
    TaskConfig,
    TrainerConfig,
)
from trajectory_queue.main import serve
from trajectory_queue.plan.profile import Profile
from trajectory_queue.plan.recorded import elapsed_seconds
from trajectory_queue.simulated import Planned, run_fleet, run_trainer

# Allows groups to be streamed; nothing is learned here.
ALGORITHM = AlgorithmConfig(
    advantage=AdvantageConfig(baseline=Baseline.NONE, normalise=Normalise.BATCH)
)


def configuration(profile: Profile, directory: Path, name: str) -> Config:
    return Config(
        run=RunConfig(name=name, directory=directory),
        model=ModelConfig(path="none"),
        task=TaskConfig(jsonl=Path("none"), reward="none:none"),
        sampling=SamplingConfig(group_size=profile.group_size, max_new_tokens=1_000_000),
        staleness=StalenessConfig(budget=profile.budget, over_budget=profile.over_budget),
        trainer=TrainerConfig(batch_groups=profile.batch_groups, algorithm=ALGORITHM),
        rollout=RolloutConfig(
            nodes=profile.rollouts.nodes, concurrency=profile.rollouts.concurrency
        ),
        queue=QueueConfig(
            filter_equal_scores=False,
            group_release="streaming" if profile.streaming else "complete",
        ),
    )


async def play(profile: Profile, directory: Path, name: str, steps: int, seed: int) -> list[Any]:
    """Runs a profile over a real queue service for so many steps; returns the rows of them all."""
    config = configuration(profile, directory, name)
    config.run.path.mkdir(parents=True)
    (config.run.path / "config.yaml").write_text(config.to_yaml())
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    pace = Planned(profile, seed)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(config, stop=stop, on_ready=address.set_result))
        queue = config.queue.model_copy(update={"address": await address})
        dialled = config.model_copy(update={"queue": queue})
        fleet = tasks.create_task(run_fleet(dialled, profile.rollouts.nodes, "node", pace, stop))
        await run_trainer(
            dialled,
            tasks=lambda: steps * profile.queued_batch_groups,
            step_seconds=profile.trainer.step_seconds,
        )
        await fleet
        stop.set()
    return metrics_rows(config.run.path / "metrics.jsonl")


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run, without the steps in which its queue fills, and those in which tasks run out."""

    tokens_per_second: float
    trainer_busy: float
    staleness_mean: float


def measure(rows: Sequence[Any], eta: int) -> Figures:
    """`eta`: the budget, in whose steps a run fills and empties."""
    kept = rows[eta + 1 : len(rows) - eta - 1]
    seconds = sum(elapsed_seconds(row) for row in kept)
    tokens = [row["tokens_trained"] for row in kept]
    stale = sum(row["staleness_mean"] * n for row, n in zip(kept, tokens, strict=True))
    return Figures(
        tokens_per_second=sum(tokens) / seconds,
        trainer_busy=sum(row["step_seconds"] for row in kept) / seconds,
        staleness_mean=stale / sum(tokens),
    )
