"""`leeway top`: a running system in a terminal, for any operator who can reach its queue.

Shows what the queue's Status and the run's metrics.jsonl say: the trainer's newest steps (only on a
machine that has the run's directory), who waits for what, the budget and how much of it is used,
off-policy health, and the nodes with their versions. It changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import DataTable, Footer, Header, Sparkline, Static

from leeway.progress import MetricsFile, StatusReader
from leeway.v1 import queue_pb2
from leeway.versions import capacity

_REFRESH_SECONDS = 1.0
_STEPS_KEPT = 200
HEALTH = ("effective_sample_size", "chi2_token", "clip_fraction", "cap_fraction")


class Top(App[None]):
    """The dashboard; `q` ends it."""

    CSS = """
    #top { height: auto; } .panel { width: 1fr; border: round $primary; padding: 0 1; }
    Sparkline { height: 2; margin: 0 1; } #nodes { height: auto; max-height: 20; }
    """
    BINDINGS: ClassVar = [("q", "quit", "Quit")]
    TITLE = "leeway top"

    def __init__(self, metrics: Path, status_of: StatusReader) -> None:
        """`status_of`: reads the queue's status; None while it does not answer."""
        super().__init__()
        self._file = MetricsFile(metrics)
        self._status_of = status_of
        self._steps: deque[dict[str, Any]] = deque(maxlen=_STEPS_KEPT)
        self._pushed: tuple[float, int] | None = None

    def compose(self) -> ComposeResult:
        yield Header()
        with VerticalScroll():
            with Horizontal(id="top"):
                yield Static(id="waits", classes="panel")
                yield Static(id="staleness", classes="panel")
                yield Static(id="trainer", classes="panel")
            yield Static("reward by step")
            yield Sparkline([], id="reward")
            yield Static("tokens a second by step")
            yield Sparkline([], id="speed")
            yield DataTable(id="nodes")
        yield Footer()

    async def on_mount(self) -> None:
        nodes = self.query_one("#nodes", DataTable)
        nodes.add_columns("node", "version", "behind", "groups", "waits for", "since", "seen")
        self.set_interval(_REFRESH_SECONDS, self.refresh_now)
        await self.refresh_now()

    async def refresh_now(self) -> None:
        rows = await asyncio.to_thread(lambda: list(self._file.new_rows()))
        self._steps.extend(row for row in rows if row["kind"] == "step")
        status = await self._status_of()
        self.query_one("#waits", Static).update(self._waits(status))
        self.query_one("#staleness", Static).update(staleness_panel(status, self._newest))
        self.query_one("#trainer", Static).update(trainer_panel(self._newest))
        for name, metric in (("reward", "reward_mean"), ("speed", "tokens_per_second")):
            values = [float(row[metric]) for row in self._steps if metric in row]
            self.query_one(f"#{name}", Sparkline).data = values
        if status is not None:
            self._list_nodes(status)

    @property
    def _newest(self) -> Mapping[str, Any]:
        return self._steps[-1] if self._steps else {}

    def _waits(self, status: queue_pb2.StatusResponse | None) -> Text:
        now, rate = asyncio.get_running_loop().time(), 0.0
        if status is not None:
            generated = status.counters["tokens"]
            if self._pushed is not None and now > self._pushed[0]:
                rate = (generated - self._pushed[1]) / (now - self._pushed[0])
            self._pushed = (now, generated)
        return waits_panel(status, rate)

    def _list_nodes(self, status: queue_pb2.StatusResponse) -> None:
        table = self.query_one("#nodes", DataTable)
        table.clear()
        for node in status.nodes:
            table.add_row(
                node.node_id,
                str(node.version),
                str(max(0, status.version - node.version)),
                str(node.leases),
                node.waiting_for or "-",
                f"{node.waiting_seconds:.0f} s" if node.waiting_for else "",
                f"{node.seen_seconds_ago:.0f} s ago",
            )


def waits_panel(status: queue_pb2.StatusResponse | None, rate: float) -> Text:
    """Who waits for whom. `rate`: tokens a second that nodes pushed lately."""
    if status is None:
        return Text("the queue does not answer")
    waiting = status.trainer_waiting_for
    trainer = f"{waiting} ({status.trainer_waiting_seconds:.0f} s)" if waiting else "busy"
    idle = [node for node in status.nodes if node.waiting_for]
    reasons = sorted({node.waiting_for for node in idle})
    groups = status.groups
    return Text(
        "\n".join(
            [
                f"trainer waits for: {trainer}" if waiting else "trainer: busy",
                f"nodes: {len(status.nodes)}, {len(idle)} waiting",
                *(f"  for {reason}" for reason in reasons[:3]),
                f"pushed: {rate:,.0f} tokens/s",
                f"queue: {groups['waiting']} waiting, {groups['running']} running, "
                f"{groups['queued']} queued, {groups['leased']} leased",
                "admission is PAUSED" if status.paused else "",
            ]
        ).rstrip()
    )


def staleness_panel(status: queue_pb2.StatusResponse | None, step: Mapping[str, Any]) -> Text:
    """The budget, how much of it is used, and where staleness grows."""
    lines = []
    if status is not None:
        outstanding = sum(status.groups[state] for state in ("running", "queued", "leased"))
        most = capacity(status.budget, status.batch_groups)
        lines += [
            f"version {status.version}, budget {status.budget}",
            f"places: {outstanding} of {most} ({outstanding / most:.0%})",
        ]
    if step:
        lines += [
            f"staleness: mean {step['staleness_mean']:.2f}, max {step['staleness_max']}",
            f"  in flight {step['staleness_in_flight_mean']:.2f}, "
            f"in queue {step['staleness_in_queue_mean']:.2f}",
            f"masked: {step['tokens_masked'] / max(step['tokens_trained'], 1):.1%} of trained",
        ]
    return Text("\n".join(lines))


def trainer_panel(step: Mapping[str, Any]) -> Text:
    """The newest step: reward, speed, where its time went, and off-policy health."""
    if not step:
        return Text("no step yet, or the run's directory is on another machine")
    lines = [f"step {step['step']}"]
    if "reward_mean" in step:
        lines.append(f"reward {step['reward_mean']:.3f}")
    lines += [
        f"{step['tokens_per_second']:,.0f} tokens/s",
        f"learned {step['step_seconds']:.1f} s, waited {step['wait_seconds']:.1f} s, "
        f"published {step['publish_seconds']:.1f} s",
        *(f"{name} {step[name]:.3f}" for name in HEALTH if name in step),
    ]
    if step.get("alerts"):
        lines.append(f"LOOK AT: {', '.join(step['alerts'])}")
    return Text("\n".join(lines))
