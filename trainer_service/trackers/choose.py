"""Opens the trackers that the configuration asks for; each is an optional package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import yaml

from leeway.config import Config, TrackerKind
from leeway.errors import ConfigError
from trainer_service.trackers.base import TrackedRun, Tracker
from trainer_service.trackers.feed import Trackers

PACKAGES: Mapping[TrackerKind, str] = {
    TrackerKind.TENSORBOARD: "tensorboard",
    TrackerKind.WANDB: "wandb",
    TrackerKind.MLFLOW: "mlflow-skinny",
    TrackerKind.TRACKIO: "trackio",
}


def open_trackers(config: Config) -> Trackers:
    """Raises `ConfigError` when a tracker's package is not installed."""
    settings = dict(_flat(yaml.safe_load(config.to_yaml())))
    run = TrackedRun(config.run.name, config.run.path, settings)
    kinds = dict.fromkeys(config.telemetry.trackers)
    return Trackers({kind.value: partial(_implementation(kind), run) for kind in kinds})


def _implementation(kind: TrackerKind) -> type[Tracker]:
    try:
        match kind:
            case TrackerKind.TENSORBOARD:
                from trainer_service.trackers.tensorboard_tracker import TensorboardTracker

                return TensorboardTracker
            case TrackerKind.WANDB:
                from trainer_service.trackers.wandb_tracker import WandbTracker

                return WandbTracker
            case TrackerKind.MLFLOW:
                from trainer_service.trackers.mlflow_tracker import MlflowTracker

                return MlflowTracker
            case TrackerKind.TRACKIO:
                from trainer_service.trackers.trackio_tracker import TrackioTracker

                return TrackioTracker
    except ImportError as error:
        raise ConfigError(
            f"telemetry.trackers: {kind} needs a package that is not installed ({error}); run "
            f"pip install {PACKAGES[kind]}"
        ) from error


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
