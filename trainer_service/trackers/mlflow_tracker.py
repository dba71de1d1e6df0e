"""MLflow: at MLFLOW_TRACKING_URI, or as files in runs/NAME/mlflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from trainer_service.trackers.base import TrackedRun

_EXPERIMENT = "leeway"
# MLflow's own bounds.
_LONGEST_VALUE = 500
_MOST_PARAMS = 100


class MlflowTracker:
    def __init__(self, run: TrackedRun, first_step: int) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            # MLflow keeps files only for those who ask for them.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run.directory / "mlflow").absolute().as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        found = (
            self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        quoted = run.name.replace("'", "")
        earlier = self._client.search_runs([found], f"attributes.run_name = '{quoted}'")
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(found, run_name=run.name).info.run_id
        params = [Param(key, text[:_LONGEST_VALUE]) for key, text in run.settings.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _MOST_PARAMS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        rows = [Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=rows)

    def close(self) -> None:
        self._client.set_terminated(self._id)
