"""TensorBoard: event files in runs/NAME/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from trainer_service.trackers.base import TrackedRun


class TensorboardTracker:
    """What a resumed run does again replaces what was logged of it."""

    def __init__(self, run: TrackedRun, first_step: int) -> None:
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=first_step)
        lines = [f"    {name}: {value}" for name, value in run.settings.items()]
        self._writer.add_text("config", "\n".join(lines), first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
