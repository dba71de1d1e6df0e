"""What a run writes down: a row a step in metrics.jsonl, the same numbers on /metrics and in the
trackers, and samples.

Names carry their unit and reduction; docs/metrics.md has them all, with the bound at which a person
should look.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
from prometheus_client import Gauge

from trainer_service.algorithms.diagnostics import TokenSums, alerts
from trainer_service.samples import annotated
from trainer_service.trackers.feed import Trackers
from trajectory_queue.batches import answers_sampled, staleness_metrics
from trajectory_queue.client import Batch

if TYPE_CHECKING:
    from trainer_service.learn import Learned

log = structlog.get_logger(__name__)

_GAUGE = Gauge("leeway_trainer", "The newest value of a step's metric", ["metric"])


class StepTimes:
    """How long each part of a step took, in seconds."""

    def __init__(self) -> None:
        self.seconds = {"wait": 0.0, "step": 0.0, "publish": 0.0}

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[part] = time.monotonic() - started

    @property
    def waiting_share(self) -> float:
        """Of the step's time, in which the trainer waited for its batch."""
        return self.seconds["wait"] / max(sum(self.seconds.values()), 1e-9)


class Record:
    """Writes into a run's directory; a row is in the file when its call returns."""

    def __init__(self, run: Path, trackers: Trackers) -> None:
        """`trackers` are closed with the record."""
        self._file = (run / "metrics.jsonl").open("a", buffering=1)
        self._samples = run / "trajectories"
        self._samples.mkdir(exist_ok=True)
        self._last_step = time.monotonic()
        self._trackers = trackers

    def measure(
        self, version: int, batch: Batch, learned: Learned, times: StepTimes
    ) -> dict[str, Any]:
        """The row of one trained batch, which `step` then writes.

        Rewards are over all that was generated, the filtered included.
        """
        trajectories = [t for group in batch.groups for t in group.trajectories]
        untrained = batch.untrained
        scores = [t.score for t in trajectories if t.score is not None]
        count = len(scores) + untrained.trajectories
        lengths = [t.response_length for t in trajectories]
        now = time.monotonic()
        elapsed, self._last_step = now - self._last_step, now
        # None while only the critic learns.
        sums = [objective.sums for objective in learned.objectives]
        health = sum(sums, TokenSums()).metrics() if sums else {}
        outside = alerts(health)
        for name, bound in outside.items():
            log.warning("look at", metric=name, value=health[name], bound=tuple(bound))
        return dict(
            step=version,
            version=version,
            reward_mean=(sum(scores) + untrained.score_sum) / max(count, 1),
            reward_trained_mean=float(np.mean(scores)) if scores else 0.0,
            trajectories=len(trajectories),
            untrained_groups=untrained.groups,
            answer_tokens_mean=float(np.mean(lengths)) if lengths else 0.0,
            tokens_trained=sum(plan.trained_tokens for plan in learned.plans),
            tokens_packed=sum(plan.packed_tokens for plan in learned.plans),
            tokens_masked=batch.masked_tokens,
            tokens_per_second=sum(lengths) / max(elapsed, 1e-9),
            staleness_budget=batch.budget,
            **staleness_metrics(trajectories, version - 1),
            **{f"{part}_seconds": seconds for part, seconds in times.seconds.items()},
            grad_norm=learned.grad_norm,
            lr=learned.lr,
            **learned.critic,
            **health,
            alerts=sorted(outside),
            tasks=[group.task.task_id for group in batch.groups],
            answers_sampled=answers_sampled(batch.groups),
        )

    def step(self, row: Mapping[str, Any], batch: Batch, learned: Learned) -> None:
        """Writes the row of a batch, and a sample of what was trained."""
        self.write("step", **row)
        self._sample(row["version"], batch, learned)

    def evaluation(self, version: int, phase: str, batch: Batch) -> None:
        """The held-out problems, scored under `version`."""
        trajectories = [t for group in batch.groups for t in group.trajectories]
        scores = [t.score for t in trajectories if t.score is not None]
        lengths = [t.response_length for t in trajectories]
        self.write(
            "eval",
            phase=phase,
            version=version,
            reward_mean=float(np.mean(scores)) if scores else 0.0,
            trajectories=len(scores),
            answer_tokens_mean=float(np.mean(lengths)) if lengths else 0.0,
        )

    def close(self) -> None:
        self._file.close()
        self._trackers.close()

    def _sample(self, version: int, batch: Batch, learned: Learned) -> None:
        """The batch's first group, as it was trained, in the wire's own form."""
        if batch.groups:
            path = self._samples / f"step-{version:06d}.pb"
            scored = [s for objective in learned.objectives[:1] for s in objective.scored]
            group = annotated(batch.groups[0], scored)
            path.write_bytes(group.to_wire().SerializeToString())

    def write(self, kind: str, **values: Any) -> None:
        """A row of metrics.jsonl; its numbers are gauges and go to the trackers as well."""
        self._file.write(json.dumps({"kind": kind, **_rounded(values)}) + "\n")
        named = {
            name if kind == "step" else f"{kind}_{name}": number
            for name, number in numbers(values).items()
        }
        for name, number in named.items():
            _GAUGE.labels(name).set(number)
        self._trackers.log(values.get("step", values.get("version", 0)), named)


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """What of a row is a number: what gauges, trackers and the queue's status can show."""
    return {name: float(value) for name, value in row.items() if isinstance(value, int | float)}


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in values.items()
    }
