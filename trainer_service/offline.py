"""Learning from written answers, without rollouts: what `leeway sft` and `leeway dpo` run.

The same configuration, model, backend, checkpoints and export as a run of reinforcement learning,
which can start from the export: `model.path: runs/<name>/checkpoints/export`. A run that was
interrupted goes on from its last checkpoint, as if it had not been. The reference of a preference
is the model that the run begins with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path

import numpy as np
import structlog
from transformers import AutoTokenizer

from leeway import models
from leeway.config import Config
from leeway.tasks import open_source
from leeway.trajectory import Group
from trainer_service import launch
from trainer_service.algorithms.aggregation import token_weights
from trainer_service.algorithms.preference import Preference, Supervised
from trainer_service.backends.base import Backend
from trainer_service.batching import pack
from trainer_service.checkpoint import Checkpoints, export_hf, model_hash
from trainer_service.demonstrations import Demonstrations
from trainer_service.packed import StepPlan
from trainer_service.record import Record
from trainer_service.steps import with_reference
from trainer_service.trackers.choose import open_trackers

log = structlog.get_logger(__name__)


class Lesson(StrEnum):
    """What is learned from a row."""

    SFT = "sft"
    DPO = "dpo"


COLUMNS = {Lesson.SFT: ("answer",), Lesson.DPO: ("chosen", "rejected")}
"""The columns of a row that hold its answers."""


async def serve(config: Config, lesson: Lesson, *, stop: asyncio.Event) -> None:
    """Learns `trainer.steps` batches of `trainer.batch_groups` rows, or until `stop` is set.

    Raises:
        ConfigError, DataError: The configuration, the data or the model cannot work.
    """
    await asyncio.to_thread(_serve, config, lesson, stop.is_set)


def _serve(config: Config, lesson: Lesson, stopping: Callable[[], bool]) -> None:
    model = models.resolve(config.model.path)
    reference = model if lesson is Lesson.DPO else None
    with launch.learners(config.trainer, model, reference) as learners:
        if learners is not None:
            _lead(config, lesson, model, learners.policy, stopping)


def _lead(
    config: Config, lesson: Lesson, model: Path, backend: Backend, stopping: Callable[[], bool]
) -> None:
    trainer, run = config.trainer, config.run.path
    run.mkdir(parents=True, exist_ok=True)
    source = open_source(config)
    written = Demonstrations(AutoTokenizer.from_pretrained(model), backend.context_length)
    checkpoints = Checkpoints(
        run / "checkpoints",
        run_id=f"{config.run.name}/{lesson}",
        model_hash=model_hash(model),
        kept=trainer.checkpoints_kept,
    )
    step, newest = 0, checkpoints.latest()
    if newest is not None:
        backend.load(newest.path)
        step = newest.step
    record = Record(run, open_trackers(config))
    while step < trainer.steps and not stopping():
        first = step * trainer.batch_groups
        groups = [
            written.group(source.train(number), COLUMNS[lesson], number)
            for number in range(first, first + trainer.batch_groups)
        ]
        plan, loss = lesson_step(groups, lesson, config, backend)
        result = backend.step(plan.microbatches, loss)
        step += 1
        record.write(lesson, step=step, **loss.metrics(), grad_norm=result.grad_norm, lr=result.lr)
        if step % trainer.checkpoint_every == 0 or step == trainer.steps:
            newest = checkpoints.save(step, backend.save)
    record.close()
    if newest is not None and newest.step == trainer.steps:
        export = run / "checkpoints" / "export"
        export_hf(newest.path, model, export, lora_alpha=trainer.lora_alpha)
        log.info("finished", export=str(export))


def lesson_step(
    groups: Sequence[Group], lesson: Lesson, config: Config, backend: Backend
) -> tuple[StepPlan, Supervised | Preference]:
    """One optimizer step on the answers of some rows: what is computed, and its loss."""
    trainer = config.trainer
    budget, spread = trainer.microbatch_tokens, backend.spread
    lengths = [t.trained_tokens for group in groups for t in group.trajectories]
    match lesson:
        case Lesson.SFT:
            constant = trainer.algorithm.aggregation_constant or config.sampling.max_new_tokens
            weights = token_weights(trainer.algorithm.aggregation, lengths, constant)
            return pack(groups, np.ones(len(lengths)), weights, budget, spread), Supervised()
        case Lesson.DPO:
            sides = np.tile([1.0, -1.0], len(groups))
            weights = np.full(len(lengths), 1.0 / len(groups))
            plan = pack(groups, sides, weights, budget, spread, whole_groups=True)
            return with_reference(plan, backend), Preference(trainer.dpo_beta)
