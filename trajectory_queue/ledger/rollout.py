"""Producers and rollout nodes: admission, leases, pushes, failures. Lua twin: `rollout.lua`."""

from __future__ import annotations

from trajectory_queue import commands as c
from trajectory_queue.commands import Failure, Lane, State, Wait
from trajectory_queue.ledger.books import NEVER, NODE_MS, REASONS_KEPT, Books, Group, Handlers


def enqueue(books: Books, command: c.Enqueue) -> c.Enqueued:
    if command.incarnation:
        books.fence(command.incarnation)
    accepted = 0
    for task in command.tasks:
        if task.task_id not in books.known:
            accepted += 1
            books.add(task)
    return c.Enqueued(accepted, len(command.tasks) - accepted)


def lease_tasks(books: Books, command: c.LeaseTasks) -> c.TasksLeased:
    _expire_leases(books)
    books.see(command.node_id, command.version)
    names = [f"{command.request_id}/{n}" for n in range(command.max_groups)]
    held = [books.groups[books.leases[name]] for name in names if name in books.leases]
    if held:
        return _leased(books, held)
    wait = _admission(books)
    if wait is not Wait.NONE:
        return _leased(books, [], wait)
    admitted: list[Group] = []
    needs: list[int] = []
    while len(admitted) < command.max_groups:
        group = books.first_waiting(Lane.EVAL)
        if group is None:
            break
        if command.version < group.task.min_version:
            needs.append(group.task.min_version)
            break
        admitted.append(_lease(books, group, command, names[len(admitted)]))
    while len(admitted) < command.max_groups:
        group = books.first_waiting(Lane.TRAIN)
        if group is None:
            break
        required = max(books.required_version(), group.task.min_version)
        if books.outstanding() >= books.capacity():
            wait = Wait.BUDGET
            break
        if group.complete:
            _finish(books, group)
        elif command.version < required:
            needs.append(required)
            break
        else:
            admitted.append(_lease(books, group, command, names[len(admitted)]))
    return _leased(books, admitted, Wait.VERSION if needs else wait, min(needs, default=None))


def open_task(books: Books, command: c.Open) -> c.TasksLeased:
    _expire_leases(books)
    books.see(command.node_id, command.version)
    task = command.task
    lease_id = c.open_lease(task.task_id)
    if task.task_id in books.known:
        held = books.held(lease_id, command.node_id)
        return _leased(books, [held] if held is not None else [], Wait.KNOWN)
    wait = _admission(books)
    if wait is Wait.NONE and books.outstanding() >= books.capacity():
        wait = Wait.BUDGET
    required = max(books.required_version(), task.min_version)
    if wait is Wait.NONE and command.version < required:
        return _leased(books, [], Wait.VERSION, required)
    if wait is not Wait.NONE:
        return _leased(books, [], wait)
    books.add(task)
    return _leased(books, [_lease(books, books.groups[task.task_id], command, lease_id)])


def _admission(books: Books) -> Wait:
    if books.paused:
        return Wait.PAUSED
    if books.draining:
        return Wait.DRAINING
    if (
        books.payload_bytes >= books.settings.max_bytes
        and books.outstanding() >= books.settings.batch_groups
    ):
        return Wait.FULL
    return Wait.NONE


def _lease(books: Books, group: Group, command: c.LeaseTasks | c.Open, lease_id: str) -> Group:
    books.move(group, State.RUNNING)
    group.lease_id, group.node_id = lease_id, command.node_id
    group.admitted = command.version
    group.attempts += 1
    group.expires = books.clock + books.settings.lease_ms
    books.next_expiry = min(books.next_expiry, group.expires)
    group.progress, group.progressed_at = 0, books.clock
    books.leases[lease_id] = group.task.task_id
    return group


def _leased(
    books: Books, groups: list[Group], wait: Wait = Wait.NONE, needed: int | None = None
) -> c.TasksLeased:
    leases = tuple(
        c.TaskLease(
            lease_id=group.lease_id,
            attempt=group.attempts,
            ttl_ms=group.expires - books.clock,
            task=group.task.payload,
            done=tuple(sorted(group.slots)),
            partials=tuple(group.partials[index] for index in sorted(group.partials)),
        )
        for group in groups
    )
    if not leases and wait is Wait.NONE:
        wait = Wait.NO_TASK
    running = sum(books.counts[lane][State.RUNNING] for lane in Lane)
    return c.TasksLeased(
        leases=leases,
        wait=Wait.NONE if leases else wait,
        needs_version=None if leases else needed,
        run_finished=books.draining and running == 0,
        outstanding=books.outstanding(),
        capacity=books.capacity(),
        payload_bytes=books.payload_bytes,
    )


def extend(books: Books, command: c.Extend) -> c.Extended:
    node = books.see(command.node_id, command.version)
    node.waiting_for, node.waiting_ms = command.waiting_for, command.waiting_ms
    node.load_percent = command.load_percent
    lost = []
    for progress in command.progress:
        group = books.held(progress.lease_id, command.node_id)
        if group is not None and progress.tokens != group.progress:
            group.progress, group.progressed_at = progress.tokens, books.clock
        if group is None:
            lost.append(progress.lease_id)
        elif books.clock - group.progressed_at >= books.settings.stall_ms:
            lost.append(progress.lease_id)
            books.counters["stalled"] += 1
            _fail_attempt(
                books, group, Failure.INFRASTRUCTURE, f"stalled at {group.progress} tokens"
            )
        else:
            group.expires = books.clock + books.settings.lease_ms
    return c.Extended(tuple(lost))


def push(books: Books, command: c.Push) -> c.Pushed:
    size = sum(len(entry.payload) for entry in command.entries)
    if (
        books.payload_bytes + size > books.settings.max_bytes
        and books.trainable() >= books.settings.batch_groups
    ):
        return c.Pushed(full=True)
    if command.patient and any((e.newest or 0) > books.published for e in command.entries):
        return c.Pushed(ahead=True)
    accepted, duplicates, refused = [], [], []
    for entry in command.entries:
        fault = _fault(books, entry)
        group = books.groups.get(entry.task_id)
        if fault is not None:
            refused.append(fault)
            _refuse(books, entry.lease_id, fault)
        elif (
            group is None
            or group.state not in (State.WAITING, State.RUNNING)
            or entry.index in group.slots
        ):
            duplicates.append(entry.trajectory_id)
            books.counters["duplicates"] += 1
        else:
            accepted.append(entry.trajectory_id)
            _accept(books, group, entry)
    for door in command.at_the_door:
        refused.append(door.refused)
        _refuse(books, door.lease_id, door.refused)
    return c.Pushed(tuple(accepted), tuple(duplicates), tuple(refused))


def _fault(books: Books, entry: c.Entry) -> c.Refused | None:
    def refused(name: str, given: object, expected: str) -> c.Refused:
        return c.Refused(entry.trajectory_id, name, str(given), expected)

    if entry.task_id not in books.known:
        return refused("task_id", entry.task_id, "not a task of this run; push what was leased")
    leased = books.leases.get(entry.lease_id, entry.task_id)
    if leased != entry.task_id:
        return refused("task_id", entry.task_id, f"the lease is for task {leased}")
    if entry.newest is not None and entry.newest > books.published:
        return refused(
            "versions", entry.newest, f"the newest published version is {books.published}"
        )
    if 0 < books.vocabulary <= entry.largest_id:
        return refused(
            "token_ids", entry.largest_id, f"the model knows {books.vocabulary} token ids"
        )
    group = books.groups.get(entry.task_id)
    if group is None:
        return None
    if entry.index >= group.task.size:
        return refused("index", entry.index, f"the group has {group.task.size} samples")
    if entry.sampling != group.task.sampling:
        return refused("sampling", entry.sampling, f"the task asks for {group.task.sampling}")
    return None


def _refuse(books: Books, lease_id: str, refused: c.Refused) -> None:
    books.counters["refused"] += 1
    books.counters[f"refused_{refused.field}"] += 1
    group = books.groups.get(books.leases.get(lease_id, ""))
    if group is not None:
        _fail_attempt(books, group, Failure.INFRASTRUCTURE, f"refused: {refused}")


def _accept(books: Books, group: Group, entry: c.Entry) -> None:
    books.payload_bytes += len(entry.payload)
    books.payload_bytes -= len(group.partials.pop(entry.index, b""))
    books.counters["trajectories"] += 1
    books.counters["tokens"] += entry.tokens
    group.slots[entry.index] = entry
    books.task_of[entry.trajectory_id] = entry.task_id
    if group.complete and (
        group.state is State.RUNNING
        or group.task.lane is Lane.EVAL
        or books.outstanding() < books.capacity()
    ):
        _finish(books, group)


def _finish(books: Books, group: Group) -> None:
    """The group has all the samples it will get: the trainer may have it, if it can learn."""
    books.end_lease(group)
    reason = _filter(books.settings, group)
    if reason:
        books.counters[f"filtered_{reason}"] += 1
        books.end_untrained(group, State.FILTERED)
        return
    for partial in group.partials.values():
        books.payload_bytes -= len(partial)
    group.partials.clear()
    group.queued_at = books.clock
    books.move(group, State.QUEUED)


def _filter(settings: c.Settings, group: Group) -> str:
    """Why a complete group is not trained; empty when it is."""
    if group.task.lane is not Lane.TRAIN:
        return ""
    longest = max(entry.tokens for entry in group.slots.values())
    if settings.filter_longer_than is not None and longest > settings.filter_longer_than:
        return "too_long"
    scores = {entry.score for entry in group.slots.values()}
    if settings.filter_equal_scores and len(group.slots) > 1 and len(scores) == 1:
        return "equal_scores"
    return ""


def give_back(books: Books, command: c.GiveBack) -> c.Done:
    group = books.held(command.lease_id, command.node_id)
    if group is not None and group.task.external:
        _fail_attempt(books, group, Failure.INFRASTRUCTURE, "its producer gave it back")
    elif group is not None:
        books.counters["given_back"] += 1
        for partial in command.partials:
            if partial.index < group.task.size and partial.index not in group.slots:
                books.payload_bytes += len(partial.payload)
                books.payload_bytes -= len(group.partials.get(partial.index, b""))
                group.partials[partial.index] = partial.payload
        books.end_lease(group)
        books.move(group, State.WAITING)
    return c.Done()


def fail(books: Books, command: c.Fail) -> c.Done:
    group = books.held(command.lease_id, command.node_id)
    if group is not None:
        _fail_attempt(books, group, command.failure, command.message)
    return c.Done()


def expire(books: Books, _command: c.Expire) -> c.Expired:
    for name in [n for n, node in books.nodes.items() if node.seen < books.clock - NODE_MS]:
        del books.nodes[name]
    return c.Expired(_expire_leases(books))


def _expire_leases(books: Books) -> int:
    if books.clock < books.next_expiry:
        return 0
    running = [group for lane in Lane for group in books.members(lane, State.RUNNING)]
    late = sorted(
        (group for group in running if group.expires <= books.clock),
        key=lambda group: (group.expires, group.task.task_id),
    )
    books.next_expiry = min((g.expires for g in running if g.expires > books.clock), default=NEVER)
    for group in late:
        books.counters["expired"] += 1
        _fail_attempt(
            books, group, Failure.INFRASTRUCTURE, f"node {group.node_id} fell silent; lease expired"
        )
    return len(late)


def _fail_attempt(books: Books, group: Group, failure: Failure, message: str) -> None:
    books.counters[f"failed_{failure}"] += 1
    books.end_lease(group)
    group.failures += 1
    group.reasons = [*group.reasons, f"{failure}: {message}"][-REASONS_KEPT:]
    curable = failure is not Failure.DATA and not group.task.external
    if curable and group.failures < books.settings.max_attempts:
        books.move(group, State.WAITING)
    elif books.settings.min_group is not None and len(group.slots) >= books.settings.min_group:
        books.counters["short_groups"] += 1
        _finish(books, group)
    else:
        books.drop_payloads(group)
        books.move(group, State.DEAD)


HANDLERS: Handlers = {
    c.Enqueue: enqueue,
    c.Open: open_task,
    c.LeaseTasks: lease_tasks,
    c.Extend: extend,
    c.Push: push,
    c.GiveBack: give_back,
    c.Fail: fail,
    c.Expire: expire,
}
