"""Trackers: each real library holds what metrics.jsonl holds, and none can stop a run."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from leeway.config import Config, ModelConfig, RunConfig, TaskConfig, TelemetryConfig, TrackerKind
from leeway.errors import ConfigError
from tests.waiting import children
from trainer_service.record import Record
from trainer_service.trackers import choose, feed
from trainer_service.trackers.base import TrackedRun
from trainer_service.trackers.choose import open_trackers
from trainer_service.trackers.feed import FAILURES, Trackers

# Of LevelDB's log format.
_BLOCK, _FULL, _LAST = 1 << 15, 1, 4

Points = dict[str, dict[int, float]]
"""Values by the metric's name and step."""


def config(directory: Path, *trackers: TrackerKind) -> Config:
    return Config(
        run=RunConfig(name="tracked", directory=directory),
        model=ModelConfig(path="m"),
        task=TaskConfig(jsonl="rows.jsonl", reward="r.py:reward"),
        telemetry=TelemetryConfig(trackers=trackers),
    )


def read_tensorboard(run: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Of an offline run's file: a header of 7 bytes, then LevelDB's log format."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (_FULL, _LAST):
            yield whole
            whole = b""


def read_wandb(run: Path) -> Points:
    from wandb.proto import wandb_internal_pb2

    points: Points = {}
    for file in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        for data in wandb_records(file.read_bytes()):
            history = wandb_internal_pb2.Record.FromString(data).history
            for item in history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    points.setdefault(name, {})[history.step.num] = json.loads(item.value_json)
    return points


def read_mlflow(run: Path) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run / "mlflow").absolute().as_uri())
    experiment = client.get_experiment_by_name("leeway")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.params["trainer.lr"] == "1e-06"
    return {
        name: {m.step: m.value for m in client.get_metric_history(found.info.run_id, name)}
        for name in found.data.metrics
    }


def read_trackio(run: Path) -> Points:
    from trackio.sqlite_storage import SQLiteStorage

    points: Points = {}
    for row in SQLiteStorage.get_logs("leeway", "tracked"):
        for name, value in row.items():
            if name not in ("step", "timestamp"):
                points.setdefault(name, {})[row["step"]] = value
    return points


READERS: Mapping[TrackerKind, Callable[[Path], Points]] = {
    TrackerKind.TENSORBOARD: read_tensorboard,
    TrackerKind.WANDB: read_wandb,
    TrackerKind.MLFLOW: read_mlflow,
    TrackerKind.TRACKIO: read_trackio,
}


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def play(config: Config, *steps: int) -> None:
    """A life of a run that writes these steps, and its held-out problems first."""
    config.run.path.mkdir(parents=True, exist_ok=True)
    record = Record(config.run.path, open_trackers(config))
    if steps[0] == 1:
        record.write("eval", phase="before", version=0, reward_mean=0.125)
    for step in steps:
        record.write(
            "step", step=step, version=step, reward_mean=step / 8, alerts=[], answers_sampled=[1]
        )
    record.close()


@pytest.mark.parametrize("kind", list(TrackerKind))
def test_a_tracker_holds_what_metrics_jsonl_holds(tmp_path: Path, kind: TrackerKind) -> None:
    if importlib.util.find_spec(choose.PACKAGES[kind].removesuffix("-skinny")) is None:
        pytest.skip(f"{choose.PACKAGES[kind]} is not installed")
    failures = FAILURES.labels(kind.value)._value.get()
    tracked = config(tmp_path, kind)
    processes = children(os.getpid())
    play(tracked, 1, 2, 3)
    # A trainer's end takes what it started with it: nothing may still have to be written by then.
    assert [child.cmdline() for child in children(os.getpid()) if child not in processes] == []
    assert FAILURES.labels(kind.value)._value.get() == failures
    points = READERS[kind](tracked.run.path)
    assert points["reward_mean"] == {1: 0.125, 2: 0.25, 3: 0.375}
    assert points["eval_reward_mean"] == {0: 0.125}
    rows = [json.loads(line) for line in (tracked.run.path / "metrics.jsonl").open()]
    numbers = {name for name, value in rows[-1].items() if isinstance(value, int | float)}
    ours = {name for name in points if not name.startswith("eval_")}
    assert ours == numbers - ({"step"} if kind is TrackerKind.TRACKIO else set())


@pytest.mark.parametrize("kind", [TrackerKind.TENSORBOARD, TrackerKind.MLFLOW])
def test_a_resumed_run_goes_on_in_the_same_place(tmp_path: Path, kind: TrackerKind) -> None:
    tracked = config(tmp_path, kind)
    play(tracked, 1, 2, 3)
    play(tracked, 3, 4)
    points = READERS[kind](tracked.run.path)["reward_mean"]
    assert points == {step: step / 8 for step in (1, 2, 3, 4)}


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "trainer_service.trackers.wandb_tracker", raising=False)
    with pytest.raises(ConfigError, match=r"telemetry\.trackers: wandb .*pip install wandb"):
        open_trackers(config(tmp_path, TrackerKind.WANDB))


class Stubborn:
    """Raises at its second row."""

    def __init__(self, _run: TrackedRun, _first: int) -> None:
        self.rows: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            raise RuntimeError("no disk")
        self.rows.append(step)

    def close(self) -> None:
        raise OSError("no network")


def test_a_tracker_that_fails_costs_its_own_rows_only(tmp_path: Path) -> None:
    run = SimpleNamespace(stubborn=None)

    def opener(first: int) -> Any:
        if first == 0:
            raise ConnectionError("not there yet")
        run.stubborn = Stubborn(TrackedRun("r", tmp_path, {}), first)
        return run.stubborn

    with capture_logs() as logs:
        trackers = Trackers({"stubborn": opener})
        for step in range(4):
            trackers.log(step, {"reward_mean": 1.0})
        trackers.close()
    assert run.stubborn.rows == [1, 3]
    assert [entry["reason"] for entry in logs] == [
        "ConnectionError('not there yet')",
        "RuntimeError('no disk')",
        "OSError('no network')",
    ]
    assert FAILURES.labels("stubborn")._value.get() == 3


def test_a_tracker_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(feed, "_MOST_ROWS", 2)
    release = threading.Event()

    def opener(_first: int) -> Any:
        release.wait(60)
        raise TimeoutError

    with capture_logs() as logs:
        trackers = Trackers({"hung": opener})
        for step in range(5):
            trackers.log(step, {})
        trackers.close()
        release.set()
    reasons = [entry["reason"] for entry in logs]
    assert "it is 2 rows behind" in reasons
    assert "not closed within 0.2 s" in reasons
