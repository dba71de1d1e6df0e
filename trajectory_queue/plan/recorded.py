"""The profile of a recorded run: its configuration, and what its steps wrote into metrics.jsonl.

- Answers are resampled in whole groups from those that each step wrote down (`answers_sampled`),
  with the seconds that they took: how many run at once is in there, and with it what a node can do.
- A step's seconds are a line through tokens trained and seconds taken.
- What is left of the time between two steps is the queue's and the checkpoints', and so is what a
  trainer in step with its nodes waits beyond the slowest answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from leeway import config as configuration
from leeway.config import Config
from leeway.errors import ConfigError
from leeway.report import read_rows
from trajectory_queue.plan.profile import Profile, Rollouts, Trainer

# The first step includes everybody's start.
FIRST_STEPS = 1
_FEWEST_STEPS = 3
# A wait below this share of a step is no wait for generation.
_READY_SHARE = 0.15


def recorded_steps(run: Path) -> list[dict[str, Any]]:
    """The steps of a run without the first.

    Raises:
        ConfigError: there are too few.
    """
    steps = [row for row in read_rows(run) if row["kind"] == "step"][FIRST_STEPS:]
    if len(steps) < _FEWEST_STEPS:
        raise ConfigError(
            f"{run / 'metrics.jsonl'}: {len(steps)} steps after the first; a prediction needs "
            f"{_FEWEST_STEPS}"
        )
    return steps


def from_run(run: Path, *, update_seconds: float = 0.0) -> Profile:
    """Args:
    update_seconds: From the end of a step until nodes have its weights; not in the record.
    """
    config = configuration.load(run / "config.yaml", environ={})
    steps = recorded_steps(run)
    untrained = sum(row["untrained_groups"] for row in steps)
    trained = len(steps) * config.queued_batch_groups
    return Profile(
        name=run.name,
        source=f"recorded: {len(steps)} steps of {run}",
        group_size=config.sampling.group_size,
        batch_groups=config.trainer.batch_groups,
        budget=config.staleness.first_budget,
        over_budget=config.staleness.over_budget,
        max_reissues=config.staleness.max_reissues,
        patience_seconds=config.staleness.patience_seconds,
        streaming=config.queue.group_release == "streaming",
        lease_seconds=config.queue.lease_seconds,
        rollouts=Rollouts(
            nodes=config.rollout.nodes,
            concurrency=config.rollout.most_concurrency,
            answers=tuple(
                tuple((float(tokens), float(seconds)) for tokens, seconds in group)
                for row in steps
                for group in row["answers_sampled"]
            ),
            update_mode=config.rollout.update_mode,
            update_seconds=update_seconds,
            no_signal_share=untrained / (untrained + trained),
        ),
        trainer=_trainer(config, steps),
    )


def elapsed_seconds(row: dict[str, Any]) -> float:
    """Between the ends of the step before and of this one."""
    return float(row["answer_tokens_mean"] * row["trajectories"] / row["tokens_per_second"])


def _answer_seconds(config: Config, steps: list[dict[str, Any]]) -> float:
    """How long the queue takes to hand over a batch that is complete.

    In step with the trainer, what its waits exceed the slowest answers by, with what it takes until
    those begin. Otherwise the shortest waits, or 0 where even those are no small part of a step:
    then no batch was complete when it was asked for.
    """
    waits = np.array([row["wait_seconds"] for row in steps])
    if _starts_at_once(config, steps):
        slowest = [_slowest(row["answers_sampled"]) for row in steps]
        return max(0.0, float(np.mean(waits - slowest)))
    shortest = float(np.quantile(waits, 0.1))
    between = float(np.mean([elapsed_seconds(row) for row in steps]))
    return shortest if shortest < _READY_SHARE * between else 0.0


def _starts_at_once(config: Config, steps: list[dict[str, Any]]) -> bool:
    """Whether every answer of a batch began with the batch, and all are on record."""
    groups, rollout = config.trainer.batch_groups, config.rollout
    return (
        config.staleness.first_budget == 0
        and rollout.nodes * rollout.most_concurrency >= groups * config.sampling.group_size
        and all(len(row["answers_sampled"]) == groups for row in steps)
    )


def _slowest(groups: list[list[tuple[int, float]]]) -> float:
    return max(seconds for group in groups for _, seconds in group)


def _trainer(config: Config, steps: list[dict[str, Any]]) -> Trainer:
    tokens = np.array([row["tokens_trained"] for row in steps], dtype=np.float64)
    seconds = np.array([row["step_seconds"] for row in steps], dtype=np.float64)
    publish = float(np.mean([row["publish_seconds"] for row in steps]))
    spread = float(tokens.var())
    slope = float(np.cov(tokens, seconds, bias=True)[0, 1]) / spread if spread else 0.0
    # Neither part can be negative: the line goes through the mean in any case.
    slope = min(max(slope, 0.0), float(seconds.mean() / tokens.mean()))
    other = [
        elapsed_seconds(row) - row["wait_seconds"] - row["step_seconds"] - row["publish_seconds"]
        for row in steps
    ]
    return Trainer(
        gpus=float(config.trainer.ranks),
        fixed_seconds=float(seconds.mean() - slope * tokens.mean()),
        token_seconds=slope * config.trainer.ranks,
        publish_seconds=publish,
        call_seconds=max(0.0, float(np.mean(other))) + _answer_seconds(config, steps),
    )
