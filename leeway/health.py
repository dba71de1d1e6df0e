"""Is this process ready, and does it make progress: what probes ask, beside /metrics.

`/readyz` says whether the process can do its job. `/livez` fails once what should have made
progress has not: a supervisor then starts the process again. Both answer 200 or 503, with the
reason in words. The endpoint has a thread of its own, so that it also answers when the event loop
is stuck.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

LOOP_SECONDS = 30.0
"""An event loop that has not turned for so long is stuck."""
_BEAT_SECONDS = 1.0


class Health:
    """What a process knows of itself. Safe to use from any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._unready = "starting"
        # What must make progress: when it last did, and within how many seconds it must again.
        self._expected: dict[str, tuple[float, float]] = {}

    def set_ready(self, unready_because: str = "") -> None:
        """Ready; or not, with the reason."""
        with self._lock:
            self._unready = unready_because

    def progress(self, what: str, again_within: float) -> None:
        """`what` goes on, and if nothing is heard of it for so many seconds, it is stuck."""
        with self._lock:
            self._expected[what] = self._now(), again_within

    def done(self, what: str) -> None:
        """Nothing is expected of `what` for now."""
        with self._lock:
            self._expected.pop(what, None)

    def unready(self) -> str:
        """Why the process is not ready; empty when it is."""
        with self._lock:
            return self._unready

    def stuck(self) -> str:
        """What has not made progress, and for how long; empty when all did."""
        now = self._now()
        with self._lock:
            late = [
                f"{what}: no progress for {now - since:.0f} s"
                for what, (since, within) in self._expected.items()
                if now - since > within
            ]
        return "; ".join(late)

    async def beat(self) -> None:
        """Says that the event loop turns, until cancelled."""
        while True:
            self.progress("event loop", LOOP_SECONDS)
            await asyncio.sleep(_BEAT_SECONDS)


HEALTH = Health()
"""This process's own."""


def serve(host: str, port: int, health: Health = HEALTH) -> WSGIServer:
    """Answers /metrics, /livez and /readyz in a daemon thread.

    Raises:
        OSError: the address cannot be bound.
    """
    metrics: Any = make_wsgi_app()
    probes = {"/livez": health.stuck, "/readyz": health.unready}

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        probe = probes.get(environ["PATH_INFO"])
        if probe is None:
            found: Iterable[bytes] = metrics(environ, start_response)
            return found
        fault = probe()
        status = HTTPStatus.SERVICE_UNAVAILABLE if fault else HTTPStatus.OK
        headers = [("Content-Type", "text/plain; charset=utf-8")]
        start_response(f"{status.value} {status.phrase}", headers)
        return [(fault or "ok").encode() + b"\n"]

    server = make_server(host, port, answer, _Server, _Quiet)
    threading.Thread(target=server.serve_forever, daemon=True, name="health").start()
    return server


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass
