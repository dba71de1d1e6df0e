"""Between the queue's messages and the ledger's commands: the same things in both tongues."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from leeway.errors import DataError
from leeway.trajectory import Task, Trajectory
from leeway.v1 import queue_pb2 as pb
from leeway.v1 import trajectory_pb2 as domain
from trajectory_queue import commands as c
from trajectory_queue import explain
from trajectory_queue.door import sampling_text

# Of one commit; a step has some dozens.
_MOST_METRICS = 256
_LONGEST_METRIC = 100
# Sequences share a sort key with versions.
_MOST_SEQUENCES = 1 << 32

_LANES: dict[int, c.Lane] = {domain.PURPOSE_TRAIN: c.Lane.TRAIN, domain.PURPOSE_EVAL: c.Lane.EVAL}
FAILURES: dict[int, c.Failure] = {
    pb.FAILURE_KIND_INFRASTRUCTURE: c.Failure.INFRASTRUCTURE,
    pb.FAILURE_KIND_DATA: c.Failure.DATA,
    pb.FAILURE_KIND_REWARD: c.Failure.REWARD,
}


def status_response(report: c.Report, nodes_wanted: int) -> pb.StatusResponse:
    """What the ledger reports, as everybody is told."""
    return pb.StatusResponse(
        run_id=report.run_id,
        version=report.version,
        incarnation=report.incarnation,
        budget=report.budget,
        batch_groups=report.batch_groups,
        groups=report.groups,
        enqueued=report.enqueued,
        eval_groups=report.eval_groups,
        counters=report.counters,
        payload_bytes=report.payload_bytes,
        nodes=[
            pb.NodeStatus(
                node_id=node.node_id,
                version=node.version,
                leases=node.leases,
                waiting_for=node.waiting_for,
                waiting_seconds=node.waiting_ms / 1000,
                seen_seconds_ago=node.seen_ms_ago / 1000,
                load=node.load_percent / 100,
            )
            for node in report.nodes
        ],
        trainer_waiting_for=explain.trainer_wait(report),
        trainer_waiting_seconds=report.trainer_waiting_ms / 1000,
        oldest_queued_seconds=report.oldest_queued_ms / 1000,
        paused=report.paused,
        draining=report.draining,
        step_metrics=json.loads(report.step_metrics or "{}"),
        nodes_wanted=nodes_wanted,
    )


def audit_records(audit: c.AuditRecords) -> list[pb.AuditRecord]:
    return [
        pb.AuditRecord(at_seconds=r.at_ms / 1000, actor=r.actor, what=r.what) for r in audit.records
    ]


def percent(load: float) -> int:
    """Of a load that a node reports."""
    return round(100 * min(load, 1.0)) if load > 0.0 else 0


def metrics_text(metrics: Mapping[str, float]) -> str:
    """A step's metrics as the ledger keeps them: those that are numbers."""
    if len(metrics) > _MOST_METRICS or any(len(name) > _LONGEST_METRIC for name in metrics):
        raise DataError(
            f"metrics: {len(metrics)} of them; use at most {_MOST_METRICS}, with names of at most "
            f"{_LONGEST_METRIC} characters"
        )
    known = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return json.dumps(known, sort_keys=True) if known else ""


def lane(purpose: int) -> c.Lane:
    lane = _LANES.get(purpose)
    if lane is None:
        raise DataError(f"purpose = {purpose}: say train or eval")
    return lane


def new_task(message: domain.Task, *, external: bool = False) -> c.NewTask:
    task = Task.from_wire(message)
    if not 0 <= task.sequence < _MOST_SEQUENCES:
        raise DataError(f"task {task.task_id!r}: sequence = {task.sequence}: use 0 to 2^32 - 1")
    return c.NewTask(
        task_id=task.task_id,
        sequence=task.sequence,
        lane=lane(message.purpose),
        size=task.group_size,
        sampling=sampling_text(task.sampling),
        min_version=task.min_version,
        payload=message.SerializeToString(),
        external=external,
    )


def task_lease(lease: c.TaskLease) -> pb.TaskLease:
    return pb.TaskLease(
        lease_id=lease.lease_id,
        task=domain.Task.FromString(lease.task),
        attempt=lease.attempt,
        ttl_seconds=lease.ttl_ms / 1000,
        done=lease.done,
        partials=[domain.Trajectory.FromString(partial) for partial in lease.partials],
    )


def partial(message: domain.Trajectory) -> c.Partial:
    trajectory = Trajectory.from_wire(message)
    return c.Partial(trajectory.index, message.SerializeToString())
