"""What `leeway top` and the queue's page say of a running system, as lines of plain text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from leeway.v1 import queue_pb2
from leeway.versions import capacity

HEALTH = ("effective_sample_size", "chi2_token", "clip_fraction", "cap_fraction")
NODE_COLUMNS = ("node", "version", "behind", "groups", "load", "waits for", "since", "seen")


def waits(status: queue_pb2.StatusResponse | None, rate: float) -> list[str]:
    """Who waits for whom. `rate`: tokens a second that nodes pushed lately."""
    if status is None:
        return ["the queue does not answer"]
    waiting = status.trainer_waiting_for
    trainer = f"{waiting} ({status.trainer_waiting_seconds:.0f} s)" if waiting else "busy"
    idle = [node for node in status.nodes if node.waiting_for]
    reasons = sorted({node.waiting_for for node in idle})
    groups = status.groups
    lines = [
        f"trainer waits for: {trainer}" if waiting else "trainer: busy",
        f"nodes: {len(status.nodes)}, {len(idle)} waiting"
        + (f"; {status.nodes_wanted} would do" if status.nodes_wanted else ""),
        *(f"  for {reason}" for reason in reasons[:3]),
        f"pushed: {rate:,.0f} tokens/s",
        f"queue: {groups['waiting']} waiting, {groups['running']} running, "
        f"{groups['queued']} queued, {groups['leased']} leased",
    ]
    if status.paused:
        lines.append("admission is PAUSED")
    return lines


def staleness(status: queue_pb2.StatusResponse | None, step: Mapping[str, Any]) -> list[str]:
    """The budget, how much of it is used, and where staleness grows."""
    lines: list[str] = []
    if status is not None:
        outstanding = sum(status.groups[state] for state in ("running", "queued", "leased"))
        most = capacity(status.budget, status.batch_groups)
        lines += [
            f"version {status.version}, budget {status.budget}",
            f"places: {outstanding} of {most} ({outstanding / most:.0%})",
        ]
    if step:
        of = partial(_number, step)
        lines += [
            f"staleness: mean {of('staleness_mean'):.2f}, max {of('staleness_max'):.0f}",
            f"  in flight {of('staleness_in_flight_mean'):.2f}, "
            f"in queue {of('staleness_in_queue_mean'):.2f}",
            f"masked: {of('tokens_masked') / max(of('tokens_trained'), 1.0):.1%} of trained",
        ]
    return lines


def trainer(step: Mapping[str, Any]) -> list[str]:
    """The newest step: reward, speed, where its time went, and off-policy health."""
    if not step:
        return ["no step yet"]
    of = partial(_number, step)
    lines = [f"step {of('step'):.0f}"]
    if "reward_mean" in step:
        lines.append(f"reward {of('reward_mean'):.3f}")
    lines += [
        f"{of('tokens_per_second'):,.0f} tokens/s",
        f"learned {of('step_seconds'):.1f} s, waited {of('wait_seconds'):.1f} s, "
        f"published {of('publish_seconds'):.1f} s",
        *(f"{name} {step[name]:.3f}" for name in HEALTH if name in step),
    ]
    if step.get("alerts"):
        lines.append(f"LOOK AT: {', '.join(step['alerts'])}")
    return lines


def _number(step: Mapping[str, Any], name: str) -> float:
    """NaN when the trainer did not report it."""
    return float(step.get(name, math.nan))


def changes(records: Sequence[queue_pb2.AuditRecord]) -> list[str]:
    """Who changed what and why, newest first: operators, and `auto` with its reasons."""
    lines = [
        f"{datetime.fromtimestamp(record.at_seconds, UTC):%H:%M:%S} UTC  {record.what}, by "
        f"{record.actor}"
        for record in records
    ]
    return lines or ["nobody has changed the budget or admission"]


def nodes(status: queue_pb2.StatusResponse) -> list[tuple[str, ...]]:
    """A row of `NODE_COLUMNS` for each node."""
    return [
        (
            node.node_id,
            str(node.version),
            str(max(0, status.version - node.version)),
            str(node.leases),
            f"{node.load:.0%}",
            node.waiting_for or "-",
            f"{node.waiting_seconds:.0f} s" if node.waiting_for else "",
            f"{node.seen_seconds_ago:.0f} s ago",
        )
        for node in status.nodes
    ]
