"""Why somebody waits, in words: for people, `leeway status` and logs."""

from __future__ import annotations

from trajectory_queue.commands import BatchLeased, Report, Settings, TasksLeased, Wait


def task_wait(leased: TasksLeased, settings: Settings) -> str:
    """Why a node was given nothing; empty when it was."""
    reasons = {
        Wait.NONE: "",
        Wait.PAUSED: "admission is paused by an operator",
        Wait.DRAINING: "the run is draining: no new task is leased",
        Wait.NO_TASK: "no task is waiting: the trainer has enqueued no more",
        Wait.BUDGET: f"the staleness budget: {leased.outstanding} of {leased.capacity} groups are "
        "running, queued or in training",
        Wait.FULL: f"room: the queue holds {leased.payload_bytes} of queue.max_bytes = "
        f"{settings.max_bytes} bytes; train, checkpoint more often, or raise it",
        Wait.KNOWN: "nothing: the task was opened before, and its lease has ended",
        Wait.VERSION: f"the node's weights: version {leased.needs_version} is needed",
    }
    return reasons[leased.wait]


def batch_wait(batch: BatchLeased, wanted: int, settings: Settings) -> str:
    """What a trainer's batch is missing."""
    text = (
        f"{len(batch.groups)} of {wanted} groups are complete; {batch.running} running, "
        f"{batch.waiting} waiting for a node"
    )
    if batch.awaited:
        text += f"; held for {batch.awaited} that the next version would make stale"
    if batch.payload_bytes >= settings.max_bytes:
        text += (
            f"; the queue is full ({batch.payload_bytes} of {settings.max_bytes} bytes): a "
            "checkpoint would free what is committed"
        )
    return text


def trainer_wait(report: Report) -> str:
    """What the trainer waits for; empty when it does not."""
    if not report.trainer_wants:
        return ""
    return (
        f"a batch: {report.trainer_has} of {report.trainer_wants} groups are complete; "
        f"{report.groups['running']} running, {report.groups['waiting']} waiting for a node"
    )
