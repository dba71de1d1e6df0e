"""The trainer's end of the weight broadcast.

`publish` copies a snapshot into shared memory and returns; a process of its own encodes, hashes and
serves it. That process gets one snapshot at a time. While it is busy the newest snapshot waits, and
one that is newer still takes its place: versions may skip, the trainer never waits.

When the process dies, a thread starts it again at the same address and hands it what was last
announced, so that nodes go on from the weights they hold, and then what was not yet announced.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import structlog
from prometheus_client import Counter, Gauge, Histogram

from leeway.config import SecurityConfig, TelemetryConfig, WeightsConfig
from leeway.errors import DeadlineError, InfrastructureError
from leeway.manifests import Canary
from leeway.tensors import Tensor
from trainer_service.weight_broadcast import snapshots
from trainer_service.weight_broadcast.snapshots import SLOTS, Snapshot

log = structlog.get_logger(__name__)

_GAUGES = {
    "published_version": Gauge("leeway_weights_published_version", "Newest version announced"),
    "full_bytes": Gauge("leeway_weights_full_bytes", "Size of full weights"),
    "delta_bytes": Gauge("leeway_weights_delta_bytes", "Payload from one version to the newest"),
    "changed_ratio": Gauge("leeway_weights_changed_ratio", "Elements that the last delta changed"),
    "encode_seconds": Gauge("leeway_weights_encode_seconds", "To compare, hash and encode it"),
    "nodes": Gauge("leeway_weights_nodes", "Nodes that are subscribed"),
    "lag_versions_max": Gauge(
        "leeway_weights_lag_versions_max", "Versions by which the last subscribed node is behind"
    ),
    "lagging_nodes": Gauge(
        "leeway_weights_lagging_nodes", "Subscribed nodes behind by more than weights.kept_versions"
    ),
    "served_bytes": Gauge("leeway_weights_served_bytes", "Payload bytes sent by this process"),
}
_SNAPSHOT_SECONDS = Histogram(
    "leeway_weights_snapshot_seconds", "Seconds that the trainer spends on a snapshot"
)
_RESTARTS = Counter("leeway_weights_restarts_total", "Deaths of the broadcasting process")

_START_SECONDS = 60.0
_STOP_SECONDS = 5.0
# More deaths than this within the window, and the publisher gives up.
_MOST_RESTARTS, _RESTART_WINDOW_SECONDS = 5, 60.0
_RESTART_PAUSE_SECONDS = 0.2


class WeightPublisher:
    """Publishes policies; a context manager.

    Args:
        run_id: Nodes of another run refuse the weights.
        incarnation: Which life of the trainer this is; each is higher than the last.

    Raises:
        InfrastructureError: the broadcasting process did not start.
    """

    def __init__(
        self,
        run_id: str,
        incarnation: int,
        weights: WeightsConfig,
        security: SecurityConfig,
        telemetry: TelemetryConfig,
    ) -> None:
        self._run_id = run_id
        self._incarnation = incarnation
        self._weights = weights
        self._security = security
        self._telemetry = telemetry
        self._slots = snapshots.create_slots()
        self._changed = threading.Condition()
        # All below is guarded by `_changed`.
        self._address = ""
        self._child: subprocess.Popen[bytes] | None = None
        self._free = set(range(SLOTS))
        self._writing: int | None = None
        self._waiting: deque[Snapshot] = deque()
        self._encoding: Snapshot | None = None
        self._announced: Snapshot | None = None
        self._last_version: int | None = None
        self._failure: str | None = None
        self._closed = False
        # The process dies with the thread that started it (`end_with_parent`), so that this thread
        # starts it and outlives it.
        self._thread = threading.Thread(
            target=self._supervise, name="weight-publisher", daemon=True
        )
        self._thread.start()
        self._wait(lambda: bool(self._address), _START_SECONDS, "start of the weight broadcast")

    @property
    def address(self) -> str:
        """host:port at which nodes subscribe."""
        return self._address

    @property
    def pid(self) -> int | None:
        """Of the broadcasting process."""
        return self._child.pid if self._child is not None else None

    @property
    def announced_version(self) -> int | None:
        """The newest version that nodes know of."""
        return self._announced.version if self._announced is not None else None

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], canary: Canary | None = None
    ) -> None:
        """Takes a snapshot; it is announced once it is whole.

        Args:
            version: Higher than every version published before.
            tensors: (Hugging Face name, array; bfloat16 as uint16), consumed one by one.

        Raises:
            ValueError: the version is not new.
            InfrastructureError: the broadcasting process cannot be kept alive.
        """
        with self._changed:
            self._check()
            if self._last_version is not None and version <= self._last_version:
                raise ValueError(f"version {version}: {self._last_version} is published already")
            # What waits has never been seen by anybody and is out of date now. What was announced
            # before a restart waits again, and must not go.
            if self._waiting and self._waiting[-1] is not self._announced:
                slot = self._waiting.pop().slot
            else:
                slot = self._free.pop()
            self._writing = slot
        snapshot = None
        try:
            with _SNAPSHOT_SECONDS.time():
                snapshot = snapshots.write(self._slots[slot], slot, version, tensors, canary)
        finally:
            with self._changed:
                self._writing = None
                if snapshot is None:
                    self._free.add(slot)
                else:
                    self._last_version = version
                    self._waiting.append(snapshot)
                    self._send_next()

    def wait_announced(self, version: int, deadline_seconds: float) -> None:
        """Waits until `version`, or a newer one, is announced.

        Raises:
            DeadlineError: it was not in time.
            InfrastructureError: the broadcasting process cannot be kept alive.
        """
        self._wait(
            lambda: self._announced is not None and self._announced.version >= version,
            deadline_seconds,
            f"announcement of version {version}",
        )

    def close(self) -> None:
        """Ends the broadcasting process; closing twice is fine."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._failure = self._failure or "the publisher is closed"
            child = self._child
        if child is not None and child.stdin is not None:
            try:
                child.stdin.close()
            except BrokenPipeError:
                log.debug("the broadcasting process had ended before")
        self._thread.join(2 * _STOP_SECONDS)
        for descriptor in self._slots:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _wait(self, condition: Callable[[], bool], deadline_seconds: float, what: str) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: condition() or self._failure is not None, deadline_seconds
            )
            self._check()
            if not condition():
                raise DeadlineError(f"{what}: not within {deadline_seconds:g} s")

    def _check(self) -> None:
        if self._failure is not None:
            raise InfrastructureError(self._failure)

    # --- The supervising thread

    def _supervise(self) -> None:
        deaths: deque[float] = deque(maxlen=_MOST_RESTARTS)
        while True:
            code = self._run_child()
            with self._changed:
                self._child = None
                if self._closed:
                    return
                now = time.monotonic()
                if len(deaths) == _MOST_RESTARTS and now - deaths[0] < _RESTART_WINDOW_SECONDS:
                    self._failure = (
                        f"the weight broadcast ended {_MOST_RESTARTS + 1} times within "
                        f"{_RESTART_WINDOW_SECONDS:g} s, at last with code {code}; its log says why"
                    )
                    self._changed.notify_all()
                    return
                deaths.append(now)
                self._take_back()
            _RESTARTS.inc()
            log.error("the weight broadcast ended; it is started again", code=code)
            time.sleep(_RESTART_PAUSE_SECONDS)

    def _run_child(self) -> int:
        """Runs the process from start to end; returns its exit code."""
        with self._changed:
            if self._closed:
                return 0
            # In a session of its own an interrupt from the terminal reaches only the trainer.
            child = self._child = subprocess.Popen(
                [sys.executable, "-m", "trainer_service.weight_broadcast", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=self._slots,
                start_new_session=True,
            )
            self._write(self._setup())
        assert child.stdout is not None
        for line in child.stdout:
            self._heard(json.loads(line))
        try:
            return child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()

    def _setup(self) -> dict[str, Any]:
        """The first message. Secrets go through the pipe, where no other process can read them."""
        security = self._security.model_dump(mode="json")
        if self._security.token is not None:
            security["token"] = self._security.token.get_secret_value()
        weights = self._weights.model_copy(
            update={"address": self._address or self._weights.address}
        )
        return {
            "run_id": self._run_id,
            "incarnation": self._incarnation,
            "slots": self._slots,
            "weights": weights.model_dump(mode="json"),
            "security": security,
            # The metrics of both processes are on the trainer's endpoint.
            "telemetry": self._telemetry.model_copy(update={"metrics_address": None}).model_dump(
                mode="json"
            ),
        }

    def _heard(self, message: dict[str, Any]) -> None:
        with self._changed:
            if "address" in message:
                self._address = message["address"]
            elif "metrics" in message:
                for name, value in message["metrics"].items():
                    _GAUGES[name].set(value)
            else:
                self._announced, self._encoding = self._encoding, None
                self._free.update(message["freed"])
            self._send_next()
            self._changed.notify_all()

    def _send_next(self) -> None:
        if self._address and self._encoding is None and self._waiting and self._child is not None:
            self._encoding = self._waiting.popleft()
            self._write(self._encoding.to_json())

    def _write(self, message: dict[str, Any]) -> None:
        assert self._child is not None and self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            log.warning("the weight broadcast does not listen")

    def _take_back(self) -> None:
        """Everything that the dead process held: two snapshots wait again, the rest is free."""
        for snapshot in (self._encoding, self._announced):
            if snapshot is not None and snapshot not in self._waiting:
                self._waiting.appendleft(snapshot)
        self._encoding = None
        in_use = {snapshot.slot for snapshot in self._waiting}
        self._free = set(range(SLOTS)) - in_use - {self._writing}
