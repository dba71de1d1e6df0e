"""Weights & Biases: by its own settings (WANDB_PROJECT, WANDB_MODE, ...), files in runs/NAME/wandb.

Without a key the run is kept offline; `wandb sync runs/NAME/wandb/offline-run-*` sends it later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import wandb

from trainer_service.trackers.base import TrackedRun


class WandbTracker:
    def __init__(self, run: TrackedRun, first_step: int) -> None:
        offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "leeway"),
            name=run.name,
            id=run.name,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.settings),
            mode="offline" if offline else None,
            # What the trainer prints goes to its own log.
            settings=wandb.Settings(console="off", quiet=True),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
        # Which may return before W&B's process has written all of it. That process ends with ours:
        # at once in a pod, and without W&B's own atexit hook, which a trainer's end does not run.
        wandb.teardown()
