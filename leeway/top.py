"""`leeway top`: a running system in a terminal, for any operator who can reach its queue.

Shows what the queue says: the trainer's newest steps (earlier ones only on a machine that has the
run's directory), who waits for what, the budget, how much of it is used and who changed it why,
off-policy health, and the nodes with their versions. It changes nothing. The page that the queue
serves (`trajectory_queue/page.py`) shows the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import DataTable, Footer, Header, Sparkline, Static

from leeway import panels
from leeway.progress import ChangesReader, MetricsFile, StatusReader
from leeway.v1 import queue_pb2

_REFRESH_SECONDS = 1.0
_STEPS_KEPT = 200


class Top(App[None]):
    """The dashboard; `q` ends it."""

    CSS = """
    #top { height: auto; } .panel { width: 1fr; border: round $primary; padding: 0 1; }
    Sparkline { height: 2; margin: 0 1; } #nodes { height: auto; max-height: 20; }
    """
    BINDINGS: ClassVar = [("q", "quit", "Quit")]
    TITLE = "leeway top"

    def __init__(self, metrics: Path, status_of: StatusReader, changes_of: ChangesReader) -> None:
        super().__init__()
        self._file = MetricsFile(metrics)
        self._status_of = status_of
        self._changes_of = changes_of
        self._steps: dict[int, Mapping[str, Any]] = {}
        self._pushed: tuple[float, int] | None = None

    def compose(self) -> ComposeResult:
        yield Header()
        with VerticalScroll():
            with Horizontal(id="top"):
                yield Static(id="waits", classes="panel")
                yield Static(id="staleness", classes="panel")
                yield Static(id="trainer", classes="panel")
            yield Static(id="changes", classes="panel")
            yield Static("reward by step")
            yield Sparkline([], id="reward")
            yield Static("tokens a second by step")
            yield Sparkline([], id="speed")
            yield DataTable(id="nodes")
        yield Footer()

    async def on_mount(self) -> None:
        nodes = self.query_one("#nodes", DataTable)
        nodes.add_columns(*panels.NODE_COLUMNS)
        self.set_interval(_REFRESH_SECONDS, self.refresh_now)
        await self.refresh_now()

    async def refresh_now(self) -> None:
        rows = await asyncio.to_thread(lambda: list(self._file.new_rows()))
        status = await self._status_of()
        self._remember([row for row in rows if row["kind"] == "step"])
        if status is not None and status.step_metrics:
            self._remember([dict(status.step_metrics)])
        for name, lines in (
            ("waits", self._waits(status)),
            ("staleness", panels.staleness(status, self._newest)),
            ("trainer", panels.trainer(self._newest)),
            ("changes", panels.changes(await self._changes_of())),
        ):
            self.query_one(f"#{name}", Static).update(Text("\n".join(lines)))
        for name, metric in (("reward", "reward_mean"), ("speed", "tokens_per_second")):
            values = [float(row[metric]) for row in self._steps.values() if metric in row]
            self.query_one(f"#{name}", Sparkline).data = values
        if status is not None:
            self._list_nodes(status)

    def _remember(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Of a step that the file holds as well, the file's row has more."""
        for row in steps:
            known = self._steps.get(int(row["step"]), {})
            self._steps[int(row["step"])] = {**known, **row}
        for step in sorted(self._steps)[:-_STEPS_KEPT]:
            del self._steps[step]

    @property
    def _newest(self) -> Mapping[str, Any]:
        return self._steps[max(self._steps)] if self._steps else {}

    def _waits(self, status: queue_pb2.StatusResponse | None) -> list[str]:
        now, rate = asyncio.get_running_loop().time(), 0.0
        if status is not None:
            generated = status.counters["tokens"]
            if self._pushed is not None and now > self._pushed[0]:
                rate = (generated - self._pushed[1]) / (now - self._pushed[0])
            self._pushed = (now, generated)
        return panels.waits(status, rate)

    def _list_nodes(self, status: queue_pb2.StatusResponse) -> None:
        table = self.query_one("#nodes", DataTable)
        table.clear()
        for cells in panels.nodes(status):
            table.add_row(*cells)
