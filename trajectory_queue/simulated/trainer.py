"""A simulated trainer on a real queue: it resumes, leases, commits and checkpoints like a real one.

Its checkpoint is its weights: the tasks that it has been trained on, by version. What a killed
trainer had learned since its last checkpoint is gone, as it would be.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import structlog

from leeway import rpc
from leeway.config import Config
from leeway.errors import DeadlineError
from trajectory_queue.batches import answers_sampled, staleness_metrics
from trajectory_queue.client import Batch, TrainerQueue
from trajectory_queue.simulated.pace import make_task, tokens_of

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Learned:
    """A simulated trainer's weights: all that it has been trained on."""

    version: int = 0
    position: int = 0
    """Of the sampler: the next task to enqueue."""
    steps: list[tuple[int, list[str]]] = field(default_factory=list)
    """(version reached, tasks trained on to reach it)."""
    tokens_trained: int = 0
    tokens_masked: int = 0
    over_budget: int = 0
    """Trajectories that held a trainable token older than the budget allows."""
    corrupt: int = 0
    """Trajectories that were not what the fleet made."""

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self)))
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> Learned:
        return cls(**json.loads(path.read_text())) if path.exists() else cls()


class SimulatedTrainer:
    """Trains on all tasks of a run, a batch after the other."""

    def __init__(
        self,
        queue: TrainerQueue,
        config: Config,
        directory: Path,
        *,
        tasks: Callable[[], int],
        step_seconds: Callable[[float], float],
    ) -> None:
        """Args:
        tasks: How many there are; it may change while the run lasts.
        step_seconds: By the number of trained tokens.
        """
        self._queue = queue
        self._config = config
        self._path = directory / "learned.json"
        self._metrics = directory / "metrics.jsonl"
        self._tasks = tasks
        self._step_seconds = step_seconds
        self.learned = Learned()

    async def run(self) -> Learned:
        """Begins at the last checkpoint; returns when every task has ended."""
        self.learned = Learned.load(self._path)
        await self._queue.resume(self.learned.version)
        began = time.monotonic()
        while await self._feed():
            asked = time.monotonic()
            batch = await self._lease()
            if batch is None:
                continue
            leased = time.monotonic()
            tokens = sum(t.trained_tokens for g in batch.groups for t in g.trajectories)
            await asyncio.sleep(self._step_seconds(tokens))
            learned = time.monotonic()
            self._learn(batch)
            await self._queue.commit(batch, version=self.learned.version, tokens_trained=tokens)
            ended = time.monotonic()
            self._record(batch, tokens, leased - asked, learned - leased, ended - began)
            began = ended
            if self.learned.version % self._config.trainer.checkpoint_every == 0:
                await self._checkpoint()
        await self._checkpoint()
        await self._queue.drain()
        return self.learned

    async def _feed(self) -> int:
        """Keeps tasks waiting; returns how many groups are still to come."""
        batch = self._config.queued_batch_groups
        status = await self._queue.status()
        wanted = 2 * (status.budget + 1) * batch - status.groups["waiting"]
        last = max(
            self.learned.position,
            min(self._tasks(), self.learned.position + max(0, wanted)),
        )
        fresh = [make_task(n, self._config) for n in range(self.learned.position, last)]
        if fresh:
            await self._queue.enqueue(fresh)
            self.learned.position = last
            status = await self._queue.status()
        return sum(status.groups[state] for state in ("waiting", "running", "queued", "leased"))

    async def _lease(self) -> Batch | None:
        """A batch; a smaller one when fewer groups are left; None when that has changed."""
        left = await self._feed()
        if not left:
            return None
        try:
            return await self._queue.lease_batch(
                version=self.learned.version,
                groups=min(self._config.queued_batch_groups, left),
                deadline_seconds=self._config.trainer.batch_seconds,
            )
        except DeadlineError as error:
            log.warning("no batch yet", reason=str(error))
            return None

    def _learn(self, batch: Batch) -> None:
        learned = self.learned
        oldest = learned.version - batch.budget
        for group in batch.groups:
            for trajectory in group.trajectories:
                made = tokens_of(group.task, trajectory.index, trajectory.response_length)
                learned.corrupt += not np.array_equal(made, trajectory.token_ids)
                learned.tokens_trained += trajectory.trained_tokens
                versions = trajectory.version_range()
                learned.over_budget += versions is not None and versions[0] < oldest
        learned.tokens_masked += batch.masked_tokens
        learned.version += 1
        learned.steps.append((learned.version, [group.task.task_id for group in batch.groups]))

    def _record(self, batch: Batch, tokens: int, wait: float, step: float, elapsed: float) -> None:
        """A row of metrics.jsonl, under the names of a real trainer's."""
        trajectories = [t for group in batch.groups for t in group.trajectories]
        lengths = [t.response_length for t in trajectories]
        version = self.learned.version
        row = {
            "kind": "step",
            "step": version,
            "version": version,
            "trajectories": len(trajectories),
            "untrained_groups": batch.untrained.groups,
            "answer_tokens_mean": sum(lengths) / len(lengths),
            "tokens_trained": tokens,
            "tokens_masked": batch.masked_tokens,
            "tokens_per_second": sum(lengths) / elapsed,
            "wait_seconds": wait,
            "step_seconds": step,
            "publish_seconds": 0.0,
            **staleness_metrics(trajectories, version - 1),
            "answers_sampled": answers_sampled(batch.groups),
        }
        with self._metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    async def _checkpoint(self) -> None:
        self.learned.save(self._path)
        await self._queue.checkpointed(self.learned.version)


async def run_trainer(
    config: Config, *, tasks: Callable[[], int], step_seconds: Callable[[float], float]
) -> Learned:
    """Trains on so many tasks; its checkpoint lies in the run's directory."""
    config.run.path.mkdir(parents=True, exist_ok=True)
    address, limit = config.queue.address, config.queue.max_message_bytes
    async with rpc.connect(address, config.security, limit) as channel:
        trainer = SimulatedTrainer(
            TrainerQueue(channel, "trainer"),
            config,
            config.run.path,
            tasks=tasks,
            step_seconds=step_seconds,
        )
        return await trainer.run()
