"""What probes are told: ready or why not, and what is stuck."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from leeway import health
from leeway.health import LOOP_SECONDS, Health


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def served(clock: Clock) -> Iterator[tuple[Health, str]]:
    known = Health(clock)
    server = health.serve("127.0.0.1", 0, known)
    yield known, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_ready_is_said_and_unready_has_its_reason(served: tuple[Health, str]) -> None:
    known, url = served
    assert get(f"{url}/readyz") == (503, "starting\n")
    known.set_ready()
    assert get(f"{url}/readyz") == (200, "ok\n")
    known.set_ready("draining")
    assert get(f"{url}/readyz") == (503, "draining\n")


def test_what_makes_no_progress_is_named(served: tuple[Health, str], clock: Clock) -> None:
    known, url = served
    assert get(f"{url}/livez")[0] == 200
    known.progress("generation", 60)
    clock.seconds = 59
    assert get(f"{url}/livez")[0] == 200
    clock.seconds = 61
    assert get(f"{url}/livez") == (503, "generation: no progress for 61 s\n")
    known.progress("generation", 60)
    assert get(f"{url}/livez")[0] == 200
    clock.seconds = 1000
    known.done("generation")
    assert get(f"{url}/livez")[0] == 200


def test_metrics_are_beside_them(served: tuple[Health, str]) -> None:
    status, text = get(f"{served[1]}/metrics")
    assert status == 200
    assert "# TYPE leeway_rpc_refused_total counter" in text


async def test_an_event_loop_that_stands_still_is_stuck(clock: Clock) -> None:
    known = Health(clock)
    beating = asyncio.create_task(known.beat())
    await asyncio.sleep(0)
    assert known.stuck() == ""
    clock.seconds = LOOP_SECONDS + 1
    assert known.stuck().startswith("event loop")
    beating.cancel()
