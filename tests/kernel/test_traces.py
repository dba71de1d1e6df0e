"""One trace a task, whoever records: the same ids in every process, over a real OTLP connection."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.traces import Traces, ids
from tests.deploy.collector import collector

Spans = Callable[[], list[dict[str, str]]]


@pytest.fixture
def collected(tmp_path: Path) -> Iterator[tuple[Spans, str]]:
    """What a collector has got so far, and its URL."""
    file = tmp_path / "spans.jsonl"
    file.touch()
    server = collector("127.0.0.1", 0, file)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield (
        lambda: [json.loads(line) for line in file.read_text().splitlines()],
        f"http://127.0.0.1:{server.server_port}/v1/traces",
    )
    server.shutdown()
    server.server_close()


def test_processes_write_one_trace(collected: tuple[Spans, str]) -> None:
    spans, url = collected
    queue, node, trainer = Traces(), Traces(), Traces()
    queue.open(url, 1.0, "run", role="queue")
    node.open(url, 1.0, "run", role="rollout", node="n0")
    trainer.open(url, 1.0, "run", role="trainer")
    queue.begin("task-1", "lease", node="n0")
    node.span("task-1", "roll out", 1_000_000_000.0, tokens=7)
    queue.span("task-1", "push", 1_000_000_001.0)
    trainer.span("task-1", "learn", 1_000_000_002.0, version=3)
    for traces in (queue, node, trainer):
        traces.close()
    received = spans()
    assert [(span["service"], span["name"]) for span in received] == [
        ("leeway-queue", "lease"),
        ("leeway-queue", "push"),
        ("leeway-rollout", "roll out"),
        ("leeway-trainer", "learn"),
    ]
    trace, root = ids("run", "task-1")
    first, *others = received
    assert first["span"] == f"{root:016x}" and not first["parent"]
    assert all(span["trace"] == f"{trace:032x}" for span in received)
    assert all(span["parent"] == first["span"] for span in others)
    assert len({span["span"] for span in received}) == 4


def test_every_process_chooses_the_same_tasks(collected: tuple[Spans, str]) -> None:
    spans, url = collected
    one, other = Traces(), Traces()
    one.open(url, 0.25, "run", role="queue")
    other.open(url, 0.25, "run", role="trainer")
    for number in range(400):
        one.begin(f"task-{number}", "lease")
        other.span(f"task-{number}", "learn", 0.0)
    one.close()
    other.close()
    chosen: dict[str, set[str]] = {}
    for span in spans():
        chosen.setdefault(span["service"], set()).add(span["trace"])
    assert chosen["leeway-queue"] == chosen["leeway-trainer"]
    assert 60 < len(chosen["leeway-queue"]) < 140


def test_without_an_endpoint_nothing_is_recorded() -> None:
    traces = Traces()
    traces.begin("task", "lease")
    traces.span("task", "learn", 0.0)
    traces.close()


def test_a_collector_that_is_away_stops_nobody() -> None:
    traces = Traces()
    traces.open("http://127.0.0.1:1/v1/traces", 1.0, "run", role="queue")
    traces.begin("task", "lease")


@given(st.text(max_size=20), st.text(max_size=20))
def test_ids_are_legal(run: str, task: str) -> None:
    trace, span = ids(run, task)
    assert 0 < trace < 2**128 and 0 < span < 2**64
