"""Settings, status, and what operators do. Lua twin: `operator.lua`."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from trajectory_queue import commands as c
from trajectory_queue.commands import Lane, State
from trajectory_queue.ledger.books import Books, Group, Handlers


def configure(books: Books, command: c.Configure) -> c.Done:
    if command.settings.budget != books.settings.budget or not books.settings.run_id:
        books.budget = command.settings.budget
    books.settings = command.settings
    return c.Done()


def status(books: Books, _command: c.Status) -> c.Report:
    queued = books.members(Lane.TRAIN, State.QUEUED)
    first = min(queued, key=lambda group: group.age_order, default=None)
    open_batches = sorted(
        (batch.waiting_since, len(batch.task_ids), batch.wanted)
        for batch in books.batches.values()
        if batch.waiting_since is not None
    )
    since, has, wants = open_batches[0] if open_batches else (books.clock, 0, 0)
    leases = Counter(books.groups[task_id].node_id for task_id in books.leases.values())
    return c.Report(
        run_id=books.settings.run_id,
        version=books.version,
        incarnation=books.incarnation,
        budget=books.budget,
        batch_groups=books.settings.batch_groups,
        groups={state.value: books.counts[Lane.TRAIN][state] for state in State},
        enqueued=books.counts[Lane.TRAIN].total(),
        eval_groups={state.value: books.counts[Lane.EVAL][state] for state in State},
        counters={name: count for name, count in sorted(books.counters.items()) if count},
        payload_bytes=books.payload_bytes,
        nodes=tuple(
            c.NodeReport(
                node_id,
                node.version,
                leases[node_id],
                node.waiting_for,
                node.waiting_ms,
                books.clock - node.seen,
                node.load_percent,
            )
            for node_id, node in sorted(books.nodes.items())
        ),
        trainer_waiting_ms=books.clock - since,
        trainer_has=has,
        trainer_wants=wants,
        oldest_queued_ms=books.clock - first.queued_at if first is not None else 0,
        paused=books.paused,
        draining=books.draining,
        step_metrics=books.step_metrics,
    )


def set_budget(books: Books, command: c.SetBudget) -> c.BudgetSet:
    previous, books.budget = books.budget, command.budget
    books.record(command.actor, f"budget {previous} -> {command.budget}")
    return c.BudgetSet(previous)


def pause(books: Books, command: c.Pause) -> c.Done:
    books.paused = command.paused
    books.record(command.actor, "pause" if command.paused else "resume")
    return c.Done()


def drain(books: Books, command: c.Drain) -> c.Done:
    books.draining = True
    books.record(command.actor, "drain")
    return c.Done()


def inspect(books: Books, command: c.Inspect) -> c.Inspected:
    group = books.groups.get(books.task_of.get(command.id, command.id))
    if group is None:
        return c.Inspected("")
    return c.Inspected(group.task.task_id, group.state.value, group.attempts, tuple(group.reasons))


def list_dead(books: Books, command: c.ListDead) -> c.DeadTasks:
    return c.DeadTasks(
        tuple(
            c.DeadTask(group.task.task_id, tuple(group.reasons))
            for group in _dead(books)[: command.limit]
        )
    )


def requeue(books: Books, command: c.Requeue) -> c.Requeued:
    wanted = set(command.task_ids)
    dead = [g for g in _dead(books) if not g.task.external]  # No node could generate those.
    chosen = [g for g in dead if not wanted or g.task.task_id in wanted]
    for group in chosen:
        group.failures = 0
        books.move(group, State.WAITING)
    if chosen:
        books.record(command.actor, f"requeue {len(chosen)}")
    return c.Requeued(len(chosen))


def list_audit(books: Books, command: c.ListAudit) -> c.AuditRecords:
    return c.AuditRecords(tuple(islice(books.audit, command.limit)))


def _dead(books: Books) -> list[Group]:
    dead = (group for lane in Lane for group in books.members(lane, State.DEAD))
    return sorted(dead, key=lambda group: (group.task.sequence, group.task.task_id))


HANDLERS: Handlers = {
    c.Configure: configure,
    c.Status: status,
    c.SetBudget: set_budget,
    c.Pause: pause,
    c.Drain: drain,
    c.Inspect: inspect,
    c.ListDead: list_dead,
    c.Requeue: requeue,
    c.ListAudit: list_audit,
}
