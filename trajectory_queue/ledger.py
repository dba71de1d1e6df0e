"""The ledger: which group is where, and what may happen to it next.

A pure state machine without I/O: time and ids are handed in. It is the specification of the queue;
`lua/` holds the same transitions for Redis, and the tests prove that both give equal answers.

What holds after every command:
- A group moves only along `TRANSITIONS`, and for each lane
  enqueued = waiting + running + queued + leased + committed + filtered + stale + dead.
- Training groups outstanding (running + queued + leased) are at most (eta + 1) * B, unless a resume
  or a smaller budget left more there; then nothing is admitted until they are consumed.
- Bytes are kept for exactly the groups that may still be trained: from their first trajectory
  until they end, and committed ones until a checkpoint covers them.
- Time never goes back: a clock that jumps back stands still here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from leeway.config import OverBudget
from leeway.errors import DataError, FencedError
from leeway.versions import capacity, required_version
from trajectory_queue import commands as c
from trajectory_queue.commands import Failure, Lane, State, Wait

R = TypeVar("R")

TRANSITIONS: dict[State, frozenset[State]] = {
    # A late push may complete a group that lost its lease; a group may end short of samples.
    State.WAITING: frozenset({State.RUNNING, State.QUEUED, State.FILTERED}),
    State.RUNNING: frozenset({State.WAITING, State.QUEUED, State.FILTERED, State.DEAD}),
    # Dropped as stale, a group waits again until its re-issues are used up.
    State.QUEUED: frozenset({State.LEASED, State.WAITING, State.STALE}),
    State.LEASED: frozenset({State.QUEUED, State.COMMITTED}),
    # A trainer that resumes from an older checkpoint gets what was committed after it back.
    State.COMMITTED: frozenset({State.QUEUED}),
    State.FILTERED: frozenset(),
    State.STALE: frozenset(),
    # An operator may requeue it.
    State.DEAD: frozenset({State.WAITING}),
}
ENDED = (State.COMMITTED, State.FILTERED, State.STALE, State.DEAD)

# Reasons kept of a group's failed attempts: enough to see a pattern.
_REASONS_KEPT = 20
# A node unseen for so long is forgotten.
_NODE_MS = 600_000


@dataclass(slots=True)
class _Group:
    task: c.NewTask
    state: State = State.WAITING
    lease_id: str = ""
    node_id: str = ""
    expires: int = 0
    attempts: int = 0
    failures: int = 0
    reissues: int = 0
    reasons: list[str] = field(default_factory=list)
    slots: dict[int, c.Entry] = field(default_factory=dict)
    partials: dict[int, bytes] = field(default_factory=dict)
    queued_at: int = 0
    mask_below: int | None = None
    committed_at: int = 0

    @property
    def complete(self) -> bool:
        return len(self.slots) == self.task.size

    @property
    def oldest(self) -> int | None:
        return min((e.oldest for e in self.slots.values() if e.oldest is not None), default=None)

    @property
    def newest(self) -> int | None:
        return max((e.newest for e in self.slots.values() if e.newest is not None), default=None)

    @property
    def age_order(self) -> tuple[int, int, str]:
        """Oldest first: what would be over the budget soonest."""
        return (self.oldest or 0, self.task.sequence, self.task.task_id)

    @property
    def score_sum(self) -> float:
        total = 0.0
        for entry in self.slots.values():
            total += entry.score
        return total

    @property
    def payload_bytes(self) -> int:
        return sum(len(e.payload) for e in self.slots.values()) + sum(
            len(partial) for partial in self.partials.values()
        )


@dataclass(slots=True)
class _Batch:
    batch_id: str
    lane: Lane
    budget: int
    task_ids: list[str] = field(default_factory=list)
    full: bool = False
    untrained: c.Untrained = field(default_factory=c.Untrained)
    wanted: int = 0
    waiting_since: int | None = None


@dataclass(slots=True)
class _Node:
    version: int
    seen: int
    waiting_for: str = ""
    waiting_ms: int = 0


class Ledger:
    """See the module's docstring. Not thread-safe; `apply` is atomic because it never waits."""

    def __init__(self) -> None:
        self._settings = c.Settings(run_id="", batch_groups=1, budget=0)
        self._budget = 0
        self._clock = 0
        self._groups: dict[str, _Group] = {}
        self._known: set[str] = set()
        self._leases: dict[str, str] = {}
        self._task_of: dict[str, str] = {}
        self._batches: dict[tuple[str, Lane], _Batch] = {}
        self._last_commit: dict[tuple[str, Lane], tuple[str, int]] = {}
        self._nodes: dict[str, _Node] = {}
        self._counts: dict[Lane, Counter[State]] = {lane: Counter() for lane in Lane}
        self._counters: Counter[str] = Counter()
        self._untrained = c.Untrained()
        self._version = 0
        self._published = 0
        self._incarnation = 0
        self._paused = False
        self._draining = False
        self._payload_bytes = 0

    def apply(self, command: c.Command[R], now: int) -> R:
        """Applies one command at time `now` (milliseconds). See `commands.Store.apply`."""
        self._clock = max(self._clock, now)
        return cast("R", _HANDLERS[type(command)](self, command))

    # Producers ------------------------------------------------------------------------------------

    def _configure(self, command: c.Configure) -> c.Done:
        if command.settings.budget != self._settings.budget or not self._settings.run_id:
            self._budget = command.settings.budget
        self._settings = command.settings
        return c.Done()

    def _enqueue(self, command: c.Enqueue) -> c.Enqueued:
        if command.incarnation:
            self._fence(command.incarnation)
        accepted = 0
        for task in command.tasks:
            if task.task_id not in self._known:
                accepted += 1
                self._known.add(task.task_id)
                self._groups[task.task_id] = _Group(task)
                self._counts[task.lane][State.WAITING] += 1
        return c.Enqueued(accepted, len(command.tasks) - accepted)

    # Rollout nodes --------------------------------------------------------------------------------

    def _lease_tasks(self, command: c.LeaseTasks) -> c.TasksLeased:
        self._expire_leases()
        self._see(command.node_id, command.version)
        names = [f"{command.request_id}/{n}" for n in range(command.max_groups)]
        held = [self._groups[self._leases[name]] for name in names if name in self._leases]
        if held:
            return self._leased(held)
        wait = self._admission()
        if wait is not Wait.NONE:
            return self._leased([], wait)
        admitted: list[_Group] = []
        needs: list[int] = []
        for group in self._by_sequence(Lane.EVAL):
            if len(admitted) == command.max_groups:
                break
            if command.version < group.task.min_version:
                needs.append(group.task.min_version)
                break
            admitted.append(self._lease(group, command.node_id, names[len(admitted)]))
        for group in self._by_sequence(Lane.TRAIN):
            if len(admitted) == command.max_groups:
                break
            required = max(self._required_version(), group.task.min_version)
            if self._outstanding() >= self._capacity():
                wait = Wait.BUDGET
                break
            if group.complete:
                self._finish(group)
            elif command.version < required:
                needs.append(required)
                break
            else:
                admitted.append(self._lease(group, command.node_id, names[len(admitted)]))
        return self._leased(admitted, Wait.VERSION if needs else wait, min(needs, default=None))

    def _admission(self) -> Wait:
        if self._paused:
            return Wait.PAUSED
        if self._draining:
            return Wait.DRAINING
        if (
            self._payload_bytes >= self._settings.max_bytes
            and self._outstanding() >= self._settings.batch_groups
        ):
            return Wait.FULL
        return Wait.NONE

    def _lease(self, group: _Group, node_id: str, lease_id: str) -> _Group:
        self._move(group, State.RUNNING)
        group.lease_id, group.node_id = lease_id, node_id
        group.attempts += 1
        group.expires = self._clock + self._settings.lease_ms
        self._leases[lease_id] = group.task.task_id
        return group

    def _leased(
        self, groups: list[_Group], wait: Wait = Wait.NONE, needed: int | None = None
    ) -> c.TasksLeased:
        leases = tuple(
            c.TaskLease(
                lease_id=group.lease_id,
                attempt=group.attempts,
                ttl_ms=group.expires - self._clock,
                task=group.task.payload,
                done=tuple(sorted(group.slots)),
                partials=tuple(group.partials[index] for index in sorted(group.partials)),
            )
            for group in groups
        )
        if not leases and wait is Wait.NONE:
            wait = Wait.NO_TASK
        running = sum(self._counts[lane][State.RUNNING] for lane in Lane)
        return c.TasksLeased(
            leases=leases,
            wait=Wait.NONE if leases else wait,
            needs_version=None if leases else needed,
            run_finished=self._draining and running == 0,
            outstanding=self._outstanding(),
            capacity=self._capacity(),
            payload_bytes=self._payload_bytes,
        )

    def _extend(self, command: c.Extend) -> c.Extended:
        node = self._see(command.node_id, command.version)
        node.waiting_for, node.waiting_ms = command.waiting_for, command.waiting_ms
        lost = []
        for lease_id in command.lease_ids:
            group = self._held(lease_id, command.node_id)
            if group is None:
                lost.append(lease_id)
            else:
                group.expires = self._clock + self._settings.lease_ms
        return c.Extended(tuple(lost))

    def _push(self, command: c.Push) -> c.Pushed:
        size = sum(len(entry.payload) for entry in command.entries)
        if (
            self._payload_bytes + size > self._settings.max_bytes
            and self._trainable() >= self._settings.batch_groups
        ):
            return c.Pushed(full=True)
        if command.patient and any((e.newest or 0) > self._published for e in command.entries):
            return c.Pushed(ahead=True)
        accepted, duplicates, refused = [], [], []
        for entry in command.entries:
            fault = self._fault(entry)
            group = self._groups.get(entry.task_id)
            if fault is not None:
                refused.append(fault)
                self._refuse(entry.lease_id, fault)
            elif (
                group is None
                or group.state not in (State.WAITING, State.RUNNING)
                or entry.index in group.slots
            ):
                duplicates.append(entry.trajectory_id)
                self._counters["duplicates"] += 1
            else:
                accepted.append(entry.trajectory_id)
                self._accept(group, entry)
        for door in command.at_the_door:
            refused.append(door.refused)
            self._refuse(door.lease_id, door.refused)
        return c.Pushed(tuple(accepted), tuple(duplicates), tuple(refused))

    def _fault(self, entry: c.Entry) -> c.Refused | None:
        def refused(name: str, given: object, expected: str) -> c.Refused:
            return c.Refused(entry.trajectory_id, name, str(given), expected)

        if entry.task_id not in self._known:
            return refused("task_id", entry.task_id, "not a task of this run; push what was leased")
        leased = self._leases.get(entry.lease_id, entry.task_id)
        if leased != entry.task_id:
            return refused("task_id", entry.task_id, f"the lease is for task {leased}")
        if entry.newest is not None and entry.newest > self._published:
            return refused(
                "versions", entry.newest, f"the newest published version is {self._published}"
            )
        group = self._groups.get(entry.task_id)
        if group is None:
            return None
        if entry.index >= group.task.size:
            return refused("index", entry.index, f"the group has {group.task.size} samples")
        if entry.sampling != group.task.sampling:
            return refused("sampling", entry.sampling, f"the task asks for {group.task.sampling}")
        return None

    def _refuse(self, lease_id: str, refused: c.Refused) -> None:
        self._counters["refused"] += 1
        self._counters[f"refused_{refused.field}"] += 1
        group = self._groups.get(self._leases.get(lease_id, ""))
        if group is not None:
            self._fail_attempt(group, Failure.INFRASTRUCTURE, f"refused: {refused}")

    def _accept(self, group: _Group, entry: c.Entry) -> None:
        self._payload_bytes += len(entry.payload)
        self._payload_bytes -= len(group.partials.pop(entry.index, b""))
        self._counters["trajectories"] += 1
        self._counters["tokens"] += entry.tokens
        group.slots[entry.index] = entry
        self._task_of[entry.trajectory_id] = entry.task_id
        if group.complete and (
            group.state is State.RUNNING
            or group.task.lane is Lane.EVAL
            or self._outstanding() < self._capacity()
        ):
            self._finish(group)

    def _finish(self, group: _Group) -> None:
        """The group has all the samples it will get: the trainer may have it, if it can learn."""
        self._end_lease(group)
        scores = {entry.score for entry in group.slots.values()}
        if (
            self._settings.filter_equal_scores
            and group.task.lane is Lane.TRAIN
            and len(group.slots) > 1
            and len(scores) == 1
        ):
            self._end_untrained(group, State.FILTERED)
            return
        for partial in group.partials.values():
            self._payload_bytes -= len(partial)
        group.partials.clear()
        group.queued_at = self._clock
        self._move(group, State.QUEUED)

    def _give_back(self, command: c.GiveBack) -> c.Done:
        group = self._held(command.lease_id, command.node_id)
        if group is not None:
            self._counters["given_back"] += 1
            for partial in command.partials:
                if partial.index < group.task.size and partial.index not in group.slots:
                    self._payload_bytes += len(partial.payload)
                    self._payload_bytes -= len(group.partials.get(partial.index, b""))
                    group.partials[partial.index] = partial.payload
            self._end_lease(group)
            self._move(group, State.WAITING)
        return c.Done()

    def _fail(self, command: c.Fail) -> c.Done:
        group = self._held(command.lease_id, command.node_id)
        if group is not None:
            self._fail_attempt(group, command.failure, command.message)
        return c.Done()

    def _expire(self, _command: c.Expire) -> c.Expired:
        for name in [n for n, node in self._nodes.items() if node.seen < self._clock - _NODE_MS]:
            del self._nodes[name]
        return c.Expired(self._expire_leases())

    def _expire_leases(self) -> int:
        late = sorted(
            (
                group
                for group in self._groups.values()
                if group.state is State.RUNNING and group.expires <= self._clock
            ),
            key=lambda group: (group.expires, group.task.task_id),
        )
        for group in late:
            self._counters["expired"] += 1
            self._fail_attempt(
                group, Failure.INFRASTRUCTURE, f"node {group.node_id} fell silent; lease expired"
            )
        return len(late)

    def _fail_attempt(self, group: _Group, failure: Failure, message: str) -> None:
        self._counters[f"failed_{failure}"] += 1
        self._end_lease(group)
        group.failures += 1
        group.reasons = [*group.reasons, f"{failure}: {message}"][-_REASONS_KEPT:]
        if failure is not Failure.DATA and group.failures < self._settings.max_attempts:
            self._move(group, State.WAITING)
        elif self._settings.min_group is not None and len(group.slots) >= self._settings.min_group:
            self._counters["short_groups"] += 1
            self._finish(group)
        else:
            self._drop_payloads(group)
            self._move(group, State.DEAD)

    # Trainers -------------------------------------------------------------------------------------

    def _lease_batch(self, command: c.LeaseBatch) -> c.BatchLeased:
        self._fence(command.incarnation)
        if command.version != self._version:
            raise DataError(
                f"version = {command.version}: the queue's is {self._version}; commit or resume"
            )
        key = (command.trainer_id, command.lane)
        batch = self._batches.setdefault(key, _Batch(command.batch_id, command.lane, self._budget))
        batch.wanted = len(command.task_ids) or command.groups
        ended = 0
        for group in self._candidates(command):
            if len(batch.task_ids) >= batch.wanted:
                break
            if command.lane is Lane.EVAL or self._passes(group, batch.budget):
                self._move(group, State.LEASED)
                batch.task_ids.append(group.task.task_id)
        for task_id in command.task_ids:
            named = self._groups.get(task_id)
            ended += task_id not in batch.task_ids and (named is None or named.state in ENDED)
        if not batch.full and len(batch.task_ids) + ended >= batch.wanted:
            batch.full = True
            if command.lane is Lane.TRAIN:
                batch.untrained, self._untrained = self._untrained, c.Untrained()
        if batch.full:
            batch.waiting_since = None
        elif batch.waiting_since is None:
            batch.waiting_since = self._clock
        return c.BatchLeased(
            batch_id=batch.batch_id,
            groups=tuple(self._group_lease(task_id) for task_id in batch.task_ids),
            budget=batch.budget,
            full=batch.full,
            untrained=batch.untrained,
            running=self._counts[command.lane][State.RUNNING],
            waiting=self._counts[command.lane][State.WAITING],
            payload_bytes=self._payload_bytes,
        )

    def _candidates(self, command: c.LeaseBatch) -> list[_Group]:
        wanted = set(command.task_ids)
        return sorted(
            (
                group
                for task_id, group in self._groups.items()
                if group.state is State.QUEUED
                and group.task.lane is command.lane
                and (not wanted or task_id in wanted)
            ),
            key=lambda group: group.age_order,
        )

    def _passes(self, group: _Group, budget: int) -> bool:
        """The dequeue check; a group over the budget is masked, ended or counted."""
        group.mask_below = None
        limit = self._version - budget
        oldest, newest = group.oldest, group.newest
        if oldest is None or newest is None or oldest >= limit:
            return True
        policy = self._settings.over_budget
        if policy is OverBudget.KEEP:
            self._counters["kept_over_budget"] += 1
            return True
        if policy is OverBudget.MASK and newest >= limit:
            self._counters["masked"] += 1
            group.mask_below = limit
            return True
        if policy is OverBudget.DROP and group.reissues < self._settings.max_reissues:
            self._counters["reissued"] += 1
            group.reissues += 1
            self._count_lengths("dropped", group)
            self._drop_payloads(group)
            self._move(group, State.WAITING)
        else:
            self._count_lengths("dropped", group)
            self._end_untrained(group, State.STALE)
        return False

    def _group_lease(self, task_id: str) -> c.GroupLease:
        group = self._groups[task_id]
        oldest, newest = group.oldest, group.newest
        if oldest is None or newest is None:
            return c.GroupLease(task_id, 0, 0, group.payload_bytes)
        return c.GroupLease(
            task_id,
            self._version - oldest,
            newest - oldest,
            group.payload_bytes,
            group.mask_below,
        )

    def _commit(self, command: c.Commit) -> c.Committed:
        self._fence(command.incarnation)
        for key, batch in self._batches.items():
            if key[0] == command.trainer_id and batch.batch_id == command.batch_id:
                return self._commit_batch(command, key, batch)
        for key, (batch_id, count) in self._last_commit.items():
            if key[0] == command.trainer_id and batch_id == command.batch_id:
                return c.Committed(count)
        raise DataError(f"batch_id = {command.batch_id}: not leased by {command.trainer_id}")

    def _commit_batch(self, command: c.Commit, key: tuple[str, Lane], batch: _Batch) -> c.Committed:
        if batch.lane is Lane.TRAIN:
            if command.version <= self._version:
                raise DataError(
                    f"version = {command.version}: a commit needs one above {self._version}"
                )
            self._version = command.version
            self._published = max(self._published, self._version)
            self._counters["tokens_trained"] += command.tokens_trained
            self._counters["tokens_masked"] += command.tokens_masked
        for task_id in batch.task_ids:
            group = self._groups[task_id]
            group.committed_at = self._version
            self._move(group, State.COMMITTED)
            if batch.lane is Lane.TRAIN:
                self._count_lengths("trained", group)
        del self._batches[key]
        self._last_commit[key] = (batch.batch_id, len(batch.task_ids))
        return c.Committed(len(batch.task_ids))

    def _release(self, command: c.Release) -> c.Done:
        self._fence(command.incarnation)
        for key, batch in list(self._batches.items()):
            if key[0] == command.trainer_id and batch.batch_id == command.batch_id:
                self._release_batch(key)
        return c.Done()

    def _release_batch(self, key: tuple[str, Lane]) -> None:
        batch = self._batches.pop(key)
        self._add_untrained(batch.untrained)
        for task_id in batch.task_ids:
            self._move(self._groups[task_id], State.QUEUED)

    def _checkpointed(self, command: c.Checkpointed) -> c.Freed:
        self._fence(command.incarnation)
        covered = [
            group
            for group in self._groups.values()
            if group.state is State.COMMITTED
            and group.committed_at <= command.version - (group.task.lane is Lane.EVAL)
        ]
        for group in covered:
            self._drop_payloads(group)
            del self._groups[group.task.task_id]
        return c.Freed(len(covered))

    def _resume(self, command: c.Resume) -> c.Resumed:
        incarnation = command.incarnation or self._incarnation + 1
        if incarnation <= self._incarnation:
            raise FencedError(
                f"incarnation = {incarnation}: {self._incarnation} has been here already"
            )
        self._incarnation = incarnation
        self._version = command.version
        self._published = max(self._published, self._version)
        for key in list(self._batches):
            self._release_batch(key)
        self._last_commit.clear()
        lost = [
            group
            for group in self._groups.values()
            if group.state is State.COMMITTED
            and group.committed_at > command.version - (group.task.lane is Lane.EVAL)
        ]
        for group in lost:
            self._move(group, State.QUEUED)
        self._counters["restored"] += len(lost)
        return c.Resumed(incarnation, len(lost))

    def _fetch(self, command: c.Fetch) -> c.Fetched:
        groups = [self._groups.get(task_id) for task_id in command.task_ids]
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

    # Operators ------------------------------------------------------------------------------------

    def _status(self, _command: c.Status) -> c.Report:
        queued = [
            group
            for group in self._groups.values()
            if group.state is State.QUEUED and group.task.lane is Lane.TRAIN
        ]
        first = min(queued, key=lambda group: group.age_order, default=None)
        open_batches = sorted(
            (batch.waiting_since, len(batch.task_ids), batch.wanted)
            for batch in self._batches.values()
            if batch.waiting_since is not None
        )
        since, has, wants = open_batches[0] if open_batches else (self._clock, 0, 0)
        leases = Counter(self._groups[task_id].node_id for task_id in self._leases.values())
        return c.Report(
            run_id=self._settings.run_id,
            version=self._version,
            incarnation=self._incarnation,
            budget=self._budget,
            batch_groups=self._settings.batch_groups,
            groups={state.value: self._counts[Lane.TRAIN][state] for state in State},
            enqueued=self._counts[Lane.TRAIN].total(),
            eval_groups={state.value: self._counts[Lane.EVAL][state] for state in State},
            counters={name: count for name, count in sorted(self._counters.items()) if count},
            payload_bytes=self._payload_bytes,
            nodes=tuple(
                c.NodeReport(
                    node_id,
                    node.version,
                    leases[node_id],
                    node.waiting_for,
                    node.waiting_ms,
                    self._clock - node.seen,
                )
                for node_id, node in sorted(self._nodes.items())
            ),
            trainer_waiting_ms=self._clock - since,
            trainer_has=has,
            trainer_wants=wants,
            oldest_queued_ms=self._clock - first.queued_at if first is not None else 0,
            paused=self._paused,
            draining=self._draining,
        )

    def _set_budget(self, command: c.SetBudget) -> c.BudgetSet:
        previous, self._budget = self._budget, command.budget
        return c.BudgetSet(previous)

    def _pause(self, command: c.Pause) -> c.Done:
        self._paused = command.paused
        return c.Done()

    def _drain(self, _command: c.Drain) -> c.Done:
        self._draining = True
        return c.Done()

    def _inspect(self, command: c.Inspect) -> c.Inspected:
        group = self._groups.get(self._task_of.get(command.id, command.id))
        if group is None:
            return c.Inspected("")
        return c.Inspected(
            group.task.task_id, group.state.value, group.attempts, tuple(group.reasons)
        )

    def _list_dead(self, command: c.ListDead) -> c.DeadTasks:
        return c.DeadTasks(
            tuple(
                c.DeadTask(group.task.task_id, tuple(group.reasons))
                for group in self._dead()[: command.limit]
            )
        )

    def _requeue(self, command: c.Requeue) -> c.Requeued:
        wanted = set(command.task_ids)
        chosen = [g for g in self._dead() if not wanted or g.task.task_id in wanted]
        for group in chosen:
            group.failures = 0
            self._move(group, State.WAITING)
        return c.Requeued(len(chosen))

    def _dead(self) -> list[_Group]:
        dead = (group for group in self._groups.values() if group.state is State.DEAD)
        return sorted(dead, key=lambda group: (group.task.sequence, group.task.task_id))

    # Shared ---------------------------------------------------------------------------------------

    def _move(self, group: _Group, to: State) -> None:
        if to not in TRANSITIONS[group.state]:
            raise AssertionError(f"{group.task.task_id}: no way from {group.state} to {to}")
        counts = self._counts[group.task.lane]
        counts[group.state] -= 1
        counts[to] += 1
        group.state = to

    def _fence(self, incarnation: int) -> None:
        if incarnation != self._incarnation:
            raise FencedError(
                f"incarnation = {incarnation}: the trainer's current life is {self._incarnation}"
            )

    def _outstanding(self) -> int:
        return self._counts[Lane.TRAIN][State.RUNNING] + self._trainable()

    def _trainable(self) -> int:
        counts = self._counts[Lane.TRAIN]
        return counts[State.QUEUED] + counts[State.LEASED]

    def _capacity(self) -> int:
        return capacity(self._budget, self._settings.batch_groups)

    def _required_version(self) -> int:
        return required_version(
            self._version, self._outstanding(), self._settings.batch_groups, self._budget
        )

    def _by_sequence(self, lane: Lane) -> list[_Group]:
        waiting = (
            group
            for group in self._groups.values()
            if group.state is State.WAITING and group.task.lane is lane
        )
        return sorted(waiting, key=lambda group: (group.task.sequence, group.task.task_id))

    def _held(self, lease_id: str, node_id: str) -> _Group | None:
        group = self._groups.get(self._leases.get(lease_id, ""))
        return group if group is not None and group.node_id == node_id else None

    def _end_lease(self, group: _Group) -> None:
        self._leases.pop(group.lease_id, None)
        group.lease_id = ""

    def _see(self, node_id: str, version: int) -> _Node:
        node = self._nodes.setdefault(node_id, _Node(version, self._clock))
        node.version, node.seen = version, self._clock
        return node

    def _end_untrained(self, group: _Group, end: State) -> None:
        self._add_untrained(c.Untrained(1, len(group.slots), group.score_sum))
        self._drop_payloads(group)
        self._move(group, end)
        del self._groups[group.task.task_id]

    def _add_untrained(self, more: c.Untrained) -> None:
        self._untrained = c.Untrained(
            self._untrained.groups + more.groups,
            self._untrained.trajectories + more.trajectories,
            self._untrained.score_sum + more.score_sum,
        )

    def _count_lengths(self, what: str, group: _Group) -> None:
        """For the bias of dropping: lengths of what was dropped against what was trained."""
        self._counters[f"{what}_trajectories"] += len(group.slots)
        self._counters[f"{what}_tokens"] += sum(entry.tokens for entry in group.slots.values())

    def _drop_payloads(self, group: _Group) -> None:
        self._payload_bytes -= group.payload_bytes
        for entry in group.slots.values():
            del self._task_of[entry.trajectory_id]
        group.slots.clear()
        group.partials.clear()


_HANDLERS: dict[type[c.Command[Any]], Callable[[Ledger, Any], Any]] = {
    c.Configure: Ledger._configure,
    c.Enqueue: Ledger._enqueue,
    c.LeaseTasks: Ledger._lease_tasks,
    c.Extend: Ledger._extend,
    c.Push: Ledger._push,
    c.GiveBack: Ledger._give_back,
    c.Fail: Ledger._fail,
    c.Expire: Ledger._expire,
    c.LeaseBatch: Ledger._lease_batch,
    c.Commit: Ledger._commit,
    c.Release: Ledger._release,
    c.Checkpointed: Ledger._checkpointed,
    c.Resume: Ledger._resume,
    c.Fetch: Ledger._fetch,
    c.Status: Ledger._status,
    c.SetBudget: Ledger._set_budget,
    c.Pause: Ledger._pause,
    c.Drain: Ledger._drain,
    c.Inspect: Ledger._inspect,
    c.ListDead: Ledger._list_dead,
    c.Requeue: Ledger._requeue,
}
