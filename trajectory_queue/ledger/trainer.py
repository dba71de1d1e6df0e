"""The trainer: batches, commits, checkpoints, resumes. Lua twin: `trainer.lua`."""

from __future__ import annotations

from leeway.config import OverBudget
from leeway.errors import DataError, FencedError
from trajectory_queue import commands as c
from trajectory_queue.commands import Lane, State
from trajectory_queue.ledger.books import ENDED, Batch, Books, Group, Handlers


def lease_batch(books: Books, command: c.LeaseBatch) -> c.BatchLeased:
    books.fence(command.incarnation)
    if command.version != books.version:
        raise DataError(
            f"version = {command.version}: the queue's is {books.version}; commit or resume"
        )
    key = (command.trainer_id, command.lane)
    batch = books.batches.setdefault(
        key, Batch(command.batch_id, command.lane, books.budget, opened=books.clock)
    )
    batch.wanted = len(command.task_ids) or command.groups
    awaited, ended = _awaited(books, batch), 0
    for group in _candidates(books, command):
        if len(batch.task_ids) >= batch.wanted - awaited:
            break
        if command.lane is Lane.EVAL or _passes(books, group, batch.budget):
            books.move(group, State.LEASED)
            batch.task_ids.append(group.task.task_id)
    for task_id in command.task_ids:
        named = books.groups.get(task_id)
        ended += task_id not in batch.task_ids and (named is None or named.state in ENDED)
    if not batch.full and len(batch.task_ids) + ended >= batch.wanted:
        batch.full = True
        if command.lane is Lane.TRAIN:
            batch.untrained, books.untrained = books.untrained, c.Untrained()
    if batch.full:
        batch.waiting_since = None
    elif batch.waiting_since is None:
        batch.waiting_since = books.clock
    return c.BatchLeased(
        batch_id=batch.batch_id,
        groups=tuple(_group_lease(books, task_id) for task_id in batch.task_ids),
        budget=batch.budget,
        full=batch.full,
        untrained=batch.untrained,
        awaited=awaited,
        running=books.counts[command.lane][State.RUNNING],
        waiting=books.counts[command.lane][State.WAITING],
        payload_bytes=books.payload_bytes,
    )


def _awaited(books: Books, batch: Batch) -> int:
    """Running groups that fit the budget now and would be dropped after this batch."""
    settings = books.settings
    impatient = books.clock - batch.opened >= settings.patience_ms
    if settings.over_budget is not OverBudget.DROP or batch.lane is not Lane.TRAIN or impatient:
        return 0
    return sum(
        group.admitted == books.version - batch.budget
        for group in books.members(Lane.TRAIN, State.RUNNING)
    )


def _candidates(books: Books, command: c.LeaseBatch) -> list[Group]:
    wanted = set(command.task_ids)
    return sorted(
        (
            group
            for group in books.members(command.lane, State.QUEUED)
            if not wanted or group.task.task_id in wanted
        ),
        key=lambda group: group.age_order,
    )


def _passes(books: Books, group: Group, budget: int) -> bool:
    """The dequeue check; a group over the budget is masked, ended or counted."""
    group.mask_below = None
    limit = books.version - budget
    oldest, newest = group.oldest, group.newest
    if oldest is None or newest is None or oldest >= limit:
        return True
    policy = books.settings.over_budget
    if policy is OverBudget.KEEP:
        books.counters["kept_over_budget"] += 1
        return True
    if policy is OverBudget.MASK and newest >= limit:
        books.counters["masked"] += 1
        group.mask_below = limit
        return True
    reissued = group.reissues < books.settings.max_reissues and not group.task.external
    if policy is OverBudget.DROP and reissued:
        books.counters["reissued"] += 1
        group.reissues += 1
        books.count_lengths("dropped", group)
        books.drop_payloads(group)
        books.move(group, State.WAITING)
    else:
        books.count_lengths("dropped", group)
        books.end_untrained(group, State.STALE)
    return False


def _group_lease(books: Books, task_id: str) -> c.GroupLease:
    group = books.groups[task_id]
    oldest, newest = group.oldest, group.newest
    if oldest is None or newest is None:
        return c.GroupLease(task_id, 0, 0, group.payload_bytes)
    return c.GroupLease(
        task_id,
        books.version - oldest,
        newest - oldest,
        group.payload_bytes,
        group.mask_below,
    )


def commit(books: Books, command: c.Commit) -> c.Committed:
    books.fence(command.incarnation)
    for key, batch in books.batches.items():
        if key[0] == command.trainer_id and batch.batch_id == command.batch_id:
            return _commit_batch(books, command, key, batch)
    for key, (batch_id, count) in books.last_commit.items():
        if key[0] == command.trainer_id and batch_id == command.batch_id:
            return c.Committed(count)
    raise DataError(f"batch_id = {command.batch_id}: not leased by {command.trainer_id}")


def _commit_batch(
    books: Books, command: c.Commit, key: tuple[str, Lane], batch: Batch
) -> c.Committed:
    if batch.lane is Lane.TRAIN:
        if command.version <= books.version:
            raise DataError(
                f"version = {command.version}: a commit needs one above {books.version}"
            )
        books.version = command.version
        books.published = max(books.published, books.version)
        books.counters["tokens_trained"] += command.tokens_trained
        books.counters["tokens_masked"] += command.tokens_masked
        books.step_metrics = command.metrics or books.step_metrics
    for task_id in batch.task_ids:
        group = books.groups[task_id]
        group.committed_at = books.version
        books.move(group, State.COMMITTED)
        if batch.lane is Lane.TRAIN:
            books.count_lengths("trained", group)
    del books.batches[key]
    books.last_commit[key] = (batch.batch_id, len(batch.task_ids))
    return c.Committed(len(batch.task_ids))


def release(books: Books, command: c.Release) -> c.Done:
    books.fence(command.incarnation)
    for key, batch in list(books.batches.items()):
        if key[0] == command.trainer_id and batch.batch_id == command.batch_id:
            _release_batch(books, key)
    return c.Done()


def _release_batch(books: Books, key: tuple[str, Lane]) -> None:
    batch = books.batches.pop(key)
    books.add_untrained(batch.untrained)
    for task_id in batch.task_ids:
        books.move(books.groups[task_id], State.QUEUED)


def checkpointed(books: Books, command: c.Checkpointed) -> c.Freed:
    books.fence(command.incarnation)
    covered = [
        group
        for lane in Lane
        for group in books.members(lane, State.COMMITTED)
        if group.committed_at <= command.version - (lane is Lane.EVAL)
    ]
    covered.sort(key=lambda g: (g.task.lane is Lane.EVAL, g.committed_at, g.task.task_id))
    freed = covered[: command.most]
    for group in freed:
        books.drop_payloads(group)
        books.forget(group)
    return c.Freed(len(freed))


def resume(books: Books, command: c.Resume) -> c.Resumed:
    incarnation = command.incarnation or books.incarnation + 1
    if incarnation <= books.incarnation:
        raise FencedError(f"incarnation = {incarnation}: {books.incarnation} has been here already")
    books.incarnation = incarnation
    books.vocabulary = command.vocabulary or books.vocabulary
    books.version = command.version
    books.published = max(books.published, books.version)
    for key in list(books.batches):
        _release_batch(books, key)
    books.last_commit.clear()
    lost = [
        group
        for lane in Lane
        for group in books.members(lane, State.COMMITTED)
        if group.committed_at > command.version - (lane is Lane.EVAL)
    ]
    for group in lost:
        books.move(group, State.QUEUED)
    books.counters["restored"] += len(lost)
    return c.Resumed(incarnation, len(lost))


def fetch(books: Books, command: c.Fetch) -> c.Fetched:
    groups = [books.groups.get(task_id) for task_id in command.task_ids]
    return c.Fetched(
        tuple(
            c.Payload(b"", ())
            if group is None
            else c.Payload(
                group.task.payload,
                tuple(group.slots[index].payload for index in sorted(group.slots)),
            )
            for group in groups
        )
    )


HANDLERS: Handlers = {
    c.LeaseBatch: lease_batch,
    c.Commit: commit,
    c.Release: release,
    c.Checkpointed: checkpointed,
    c.Resume: resume,
    c.Fetch: fetch,
}
