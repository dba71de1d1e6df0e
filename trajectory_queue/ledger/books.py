"""The books: groups, leases, batches, nodes and counters, and the moves that keep them in order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from leeway.errors import FencedError
from leeway.versions import capacity, required_version
from trajectory_queue import commands as c
from trajectory_queue.commands import Lane, State

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
REASONS_KEPT = 20
# A node unseen for so long is forgotten.
NODE_MS = 600_000
NEVER = 1 << 62


@dataclass(slots=True)
class Group:
    task: c.NewTask
    state: State = State.WAITING
    lease_id: str = ""
    node_id: str = ""
    expires: int = 0
    admitted: int = 0
    """Version of the node's weights at the lease."""
    progress: int = 0
    progressed_at: int = 0
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
class Batch:
    batch_id: str
    lane: Lane
    budget: int
    task_ids: list[str] = field(default_factory=list)
    full: bool = False
    untrained: c.Untrained = field(default_factory=c.Untrained)
    wanted: int = 0
    opened: int = 0
    waiting_since: int | None = None


@dataclass(slots=True)
class Node:
    version: int
    seen: int
    waiting_for: str = ""
    waiting_ms: int = 0
    load_percent: int = 0


@dataclass(slots=True)
class Books:
    """Everything the ledger remembers. Whoever changes a group's state does so through `move`.

    `_members` and `_order` follow from `groups`: with them a command costs what it changes, not
    what the ledger holds.
    """

    settings: c.Settings = field(
        default_factory=lambda: c.Settings(run_id="", batch_groups=1, budget=0)
    )
    budget: int = 0
    clock: int = 0
    groups: dict[str, Group] = field(default_factory=dict)
    """By task id; filtered and stale ones are gone, committed ones go with their checkpoint."""
    _members: dict[tuple[Lane, State], dict[str, Group]] = field(
        default_factory=lambda: {(lane, state): {} for lane in Lane for state in State}
    )
    _order: dict[Lane, list[tuple[int, str]]] = field(
        default_factory=lambda: {lane: [] for lane in Lane}
    )
    """Sequence and task id of the waiting groups, sorted."""
    next_expiry: int = NEVER
    """No lease expires before."""
    known: set[str] = field(default_factory=set)
    """Every task id that was ever enqueued."""
    leases: dict[str, str] = field(default_factory=dict)
    """Task id by lease id."""
    task_of: dict[str, str] = field(default_factory=dict)
    """Task id by trajectory id."""
    batches: dict[tuple[str, Lane], Batch] = field(default_factory=dict)
    """The open batch of each trainer and lane."""
    last_commit: dict[tuple[str, Lane], tuple[str, int]] = field(default_factory=dict)
    """Batch id and number of groups: a repeated commit is answered from here."""
    nodes: dict[str, Node] = field(default_factory=dict)
    counts: dict[Lane, Counter[State]] = field(
        default_factory=lambda: {lane: Counter() for lane in Lane}
    )
    counters: Counter[str] = field(default_factory=Counter)
    untrained: c.Untrained = field(default_factory=c.Untrained)
    """Not yet told to a trainer."""
    version: int = 0
    """The trainer's."""
    published: int = 0
    """The newest that ever was the trainer's; a resume does not take it back."""
    incarnation: int = 0
    vocabulary: int = 0
    """Token ids that the trainer's model knows; 0 when it has not said."""
    paused: bool = False
    draining: bool = False
    payload_bytes: int = 0
    step_metrics: str = ""
    audit: deque[c.AuditRecord] = field(default_factory=lambda: deque(maxlen=c.AUDIT_KEPT))
    """What operators changed, newest first."""

    def move(self, group: Group, to: State) -> None:
        if to not in TRANSITIONS[group.state]:
            raise AssertionError(f"{group.task.task_id}: no way from {group.state} to {to}")
        self.counts[group.task.lane][group.state] -= 1
        self._leave(group)
        group.state = to
        self._enter(group)

    def add(self, task: c.NewTask) -> None:
        """A new group; it waits."""
        self.known.add(task.task_id)
        self.groups[task.task_id] = group = Group(task)
        self._enter(group)

    def forget(self, group: Group) -> None:
        """Nothing is kept of a group that has ended but that it did."""
        self._leave(group)
        del self.groups[group.task.task_id]

    def members(self, lane: Lane, state: State) -> Collection[Group]:
        return self._members[lane, state].values()

    def first_waiting(self, lane: Lane) -> Group | None:
        """The next to be given to a node."""
        order = self._order[lane]
        return self.groups[order[0][1]] if order else None

    def _enter(self, group: Group) -> None:
        lane, state = group.task.lane, group.state
        self.counts[lane][state] += 1
        self._members[lane, state][group.task.task_id] = group
        if state is State.WAITING:
            insort(self._order[lane], (group.task.sequence, group.task.task_id))

    def _leave(self, group: Group) -> None:
        lane, state = group.task.lane, group.state
        del self._members[lane, state][group.task.task_id]
        if state is State.WAITING:
            order = self._order[lane]
            del order[bisect_left(order, (group.task.sequence, group.task.task_id))]

    def record(self, actor: str, what: str) -> None:
        self.audit.appendleft(c.AuditRecord(self.clock, actor, what))

    def fence(self, incarnation: int) -> None:
        if incarnation != self.incarnation:
            raise FencedError(
                f"incarnation = {incarnation}: the trainer's current life is {self.incarnation}"
            )

    def outstanding(self) -> int:
        return self.counts[Lane.TRAIN][State.RUNNING] + self.trainable()

    def trainable(self) -> int:
        counts = self.counts[Lane.TRAIN]
        return counts[State.QUEUED] + counts[State.LEASED]

    def capacity(self) -> int:
        return capacity(self.budget, self.settings.batch_groups)

    def required_version(self) -> int:
        return required_version(
            self.version, self.outstanding(), self.settings.batch_groups, self.budget
        )

    def held(self, lease_id: str, node_id: str) -> Group | None:
        group = self.groups.get(self.leases.get(lease_id, ""))
        return group if group is not None and group.node_id == node_id else None

    def end_lease(self, group: Group) -> None:
        self.leases.pop(group.lease_id, None)
        group.lease_id = ""

    def see(self, node_id: str, version: int) -> Node:
        node = self.nodes.setdefault(node_id, Node(version, self.clock))
        node.version, node.seen = version, self.clock
        return node

    def end_untrained(self, group: Group, end: State) -> None:
        self.add_untrained(c.Untrained(1, len(group.slots), group.score_sum))
        self.drop_payloads(group)
        self.move(group, end)
        self.forget(group)

    def add_untrained(self, more: c.Untrained) -> None:
        self.untrained = c.Untrained(
            self.untrained.groups + more.groups,
            self.untrained.trajectories + more.trajectories,
            self.untrained.score_sum + more.score_sum,
        )

    def count_lengths(self, what: str, group: Group) -> None:
        """For the bias of dropping: lengths of what was dropped against what was trained."""
        self.counters[f"{what}_trajectories"] += len(group.slots)
        self.counters[f"{what}_tokens"] += sum(entry.tokens for entry in group.slots.values())

    def drop_payloads(self, group: Group) -> None:
        self.payload_bytes -= group.payload_bytes
        for entry in group.slots.values():
            del self.task_of[entry.trajectory_id]
        group.slots.clear()
        group.partials.clear()


Handlers = dict[type[c.Command[Any]], Callable[[Books, Any], Any]]
