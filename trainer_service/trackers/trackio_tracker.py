"""Trackio: a local dashboard (`trackio show`); its data lie in TRACKIO_DIR."""

from __future__ import annotations

import os
from collections.abc import Mapping

import trackio

from trainer_service.trackers.base import TrackedRun


class TrackioTracker:
    def __init__(self, run: TrackedRun, first_step: int) -> None:
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "leeway"),
            name=run.name,
            resume="allow",
            config=dict(run.settings),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # A word of its own, for what it is told beside the metrics.
        self._run.log({k: v for k, v in metrics.items() if k != "step"}, step=step)

    def close(self) -> None:
        self._run.finish()
