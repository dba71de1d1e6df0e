"""What a person sees while `leeway up` runs: a live table in a terminal, plain lines elsewhere.

Reads what any operator can read: the run's metrics.jsonl and the queue's Status.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from leeway.v1 import queue_pb2

_REFRESH_SECONDS = 0.5
_ROWS_SHOWN = 12


# Reads the queue's status; None while it does not answer.
StatusReader = Callable[[], Awaitable[queue_pb2.StatusResponse | None]]
# Reads the newest changes by operators and by `auto`; none while it does not answer.
ChangesReader = Callable[[], Awaitable[Sequence[queue_pb2.AuditRecord]]]


class MetricsFile:
    """The rows of a growing JSON-lines file, each read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_rows(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                yield json.loads(line)


async def show(metrics: Path, status_of: StatusReader, steps: int, console: Console) -> None:
    """Shows progress until cancelled."""
    display = _Table(console, steps) if console.is_terminal else _Lines(console, steps)
    file = MetricsFile(metrics)
    try:
        with display:
            while True:
                display.update(list(file.new_rows()), await status_of())
                await asyncio.sleep(_REFRESH_SECONDS)
    finally:
        display.rows(list(file.new_rows()))


def waits(status: queue_pb2.StatusResponse | None) -> str:
    """One line: what each side waits for, and the queue's depth."""
    if status is None:
        return "starting: the queue does not answer yet"
    groups = status.groups
    parts = [
        f"queue: {groups['running']} running, {groups['queued']} queued, {groups['leased']} leased",
        f"trainer: {_wait(status.trainer_waiting_for, status.trainer_waiting_seconds)}",
    ]
    parts += [f"{n.node_id}: {_wait(n.waiting_for, n.waiting_seconds)}" for n in status.nodes]
    return " | ".join(parts)


def _wait(what: str, seconds: float) -> str:
    return f"waits for {what} ({seconds:.0f} s)" if what else "busy"


def describe(row: dict[str, Any], steps: int) -> str:
    """One metrics row as a plain line."""
    if row["kind"] == "eval":
        return (
            f"held-out problems, {row['phase']} training (version {row['version']}): "
            f"reward {row['reward_mean']:.3f} over {row['trajectories']} answers"
        )
    return (
        f"step {row['step']}/{steps}  reward {row['reward_mean']:.3f}  "
        f"answer {row['answer_tokens_mean']:.1f} tokens  {row['tokens_per_second']:.0f} tokens/s  "
        f"staleness {row['staleness_mean']:.2f} (max {row['staleness_max']})  "
        f"waited {row['wait_seconds']:.1f} s, trained {row['step_seconds']:.1f} s"
    )


class _Lines:
    """Plain lines: one a step, and one when what is waited for has changed and lasts."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, rows: list[dict[str, Any]], status: queue_pb2.StatusResponse | None) -> None:
        for row in rows:
            self._console.print(describe(row, self._steps), highlight=False, soft_wrap=True)
            if row["kind"] == "step":
                self._console.print(f"  {waits(status)}", highlight=False, soft_wrap=True)

    def rows(self, rows: list[dict[str, Any]]) -> None:
        self.update(rows, None) if rows else None


class _Table:
    """A table that is redrawn in place, with the waits below."""

    def __init__(self, console: Console, steps: int) -> None:
        self._steps = steps
        self._rows: list[dict[str, Any]] = []
        self._evals: list[str] = []
        self._live = Live(console=console, refresh_per_second=4)
        self._status: queue_pb2.StatusResponse | None = None

    def __enter__(self) -> _Table:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def update(self, rows: list[dict[str, Any]], status: queue_pb2.StatusResponse | None) -> None:
        self._status = status
        self.rows(rows)

    def rows(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["kind"] == "eval":
                self._evals.append(describe(row, self._steps))
            else:
                self._rows.append(row)
        self._live.update(self._render())

    def _render(self) -> Group:
        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
        columns = ("step", "reward", "", "answer", "tokens/s", "staleness", "waited", "trained")
        for name in columns:
            table.add_column(name, justify="left" if name == "" else "right")
        for row in self._rows[-_ROWS_SHOWN:]:
            reward = row["reward_mean"]
            table.add_row(
                f"{row['step']}/{self._steps}",
                f"{reward:.3f}",
                Text("█" * round(20 * min(max(reward, 0.0), 1.0)), style="green"),
                f"{row['answer_tokens_mean']:.1f}",
                f"{row['tokens_per_second']:.0f}",
                f"{row['staleness_mean']:.2f} / {row['staleness_max']}",
                f"{row['wait_seconds']:.1f} s",
                f"{row['step_seconds']:.1f} s",
            )
        lines = [Text(line) for line in self._evals]
        return Group(*lines, table, Text(waits(self._status), style="dim"))
