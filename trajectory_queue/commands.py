"""Every operation of the ledger, as a command and its result.

A command is a value: the pure `Ledger` and the Redis store apply the same commands and give equal
results, which is how the tests compare them. Commands carry no time; whoever applies them hands the
clock in. Bytes (tasks, trajectories) are opaque here.

All durations and times are integers in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from leeway.config import Config, OverBudget
from trajectory_queue.signals import Signals

R = TypeVar("R")

AUDIT_KEPT = 1000


class State(StrEnum):
    """Where a group is. The last four are ends."""

    WAITING = "waiting"
    RUNNING = "running"
    QUEUED = "queued"
    LEASED = "leased"
    COMMITTED = "committed"
    FILTERED = "filtered"
    STALE = "stale"
    DEAD = "dead"


class Lane(StrEnum):
    """Training groups count against the staleness budget; evaluation has a lane of its own."""

    TRAIN = "train"
    EVAL = "eval"


class Failure(StrEnum):
    """What an attempt died of. Only what another attempt could cure is tried again."""

    INFRASTRUCTURE = "infrastructure"
    DATA = "data"
    REWARD = "reward"


class Wait(StrEnum):
    """Why nothing was leased to a node."""

    NONE = ""
    PAUSED = "paused"
    DRAINING = "draining"
    NO_TASK = "no_task"
    BUDGET = "budget"
    FULL = "full"
    VERSION = "version"
    KNOWN = "known"


class Command(Generic[R]):
    """Something that the ledger does; `R` is what it answers."""

    __slots__ = ()


class Store(Protocol):
    """Applies commands atomically and durably. Safe to share between coroutines and replicas."""

    signals: Signals
    """Set when something changed: "tasks" for nodes that wait, "groups" for trainers."""

    async def apply(self, command: Command[R]) -> R:
        """Raises:
        FencedError: the command's incarnation has been superseded.
        DataError: the command contradicts the ledger; nothing was changed.
        InfrastructureError: the store is away or full; it is unknown whether the command took
            effect, and every command may be repeated.
        """
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """What the ledger needs to know of the configuration."""

    run_id: str
    batch_groups: int
    budget: int
    over_budget: OverBudget = OverBudget.MASK
    max_reissues: int = 2
    lease_ms: int = 60_000
    max_attempts: int = 3
    max_bytes: int = 4 << 30
    filter_equal_scores: bool = True
    filter_longer_than: int | None = None
    patience_ms: int = 60_000
    stall_ms: int = 1_800_000
    min_group: int | None = None

    @classmethod
    def from_config(cls, config: Config) -> Settings:
        return cls(
            run_id=config.run.name,
            batch_groups=config.queued_batch_groups,
            budget=config.staleness.first_budget,
            over_budget=config.staleness.over_budget,
            max_reissues=config.staleness.max_reissues,
            lease_ms=int(config.queue.lease_seconds * 1000),
            max_attempts=config.queue.max_attempts,
            max_bytes=config.queue.max_bytes,
            filter_equal_scores=config.queue.filter_equal_scores,
            filter_longer_than=config.queue.filter_longer_than,
            patience_ms=int(config.staleness.patience_seconds * 1000),
            stall_ms=int(config.queue.stall_seconds * 1000),
            min_group=config.queue.min_group,
        )


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing to say but that it holds now."""


@dataclass(frozen=True, slots=True)
class Configure(Command[Done]):
    """Sets the settings, at every start of a service. A budget that an operator set at run time
    survives unless the configured one changed."""

    settings: Settings


# Producers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewTask:
    task_id: str
    sequence: int
    lane: Lane
    size: int
    sampling: str
    """How tokens are to be drawn, as text; trajectories must agree to the letter."""
    min_version: int
    payload: bytes
    external: bool = False
    """Only its producer can make its trajectories: it has one attempt, and nodes never get it."""


@dataclass(frozen=True, slots=True)
class Enqueued:
    accepted: int
    duplicates: int


@dataclass(frozen=True, slots=True)
class Enqueue(Command[Enqueued]):
    """Adds tasks that the run does not know yet. Incarnation 0: not a trainer, not fenced."""

    incarnation: int
    tasks: tuple[NewTask, ...]


# Rollout nodes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskLease:
    lease_id: str
    attempt: int
    ttl_ms: int
    task: bytes
    done: tuple[int, ...] = ()
    partials: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class TasksLeased:
    leases: tuple[TaskLease, ...] = ()
    wait: Wait = Wait.NONE
    needs_version: int | None = None
    """The node must first hold this version."""
    run_finished: bool = False
    outstanding: int = 0
    capacity: int = 0
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LeaseTasks(Command[TasksLeased]):
    """The admission point. The leases of a request are called `<request_id>/<n>`: repeating a
    request gives those that are still held."""

    node_id: str
    version: int
    max_groups: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Open(Command[TasksLeased]):
    """Adds an external training task and leases it to its producer, or does neither.

    The lease is called `open_lease(task_id)`: repeating the call gives it while it is held.
    """

    node_id: str
    version: int
    task: NewTask


def open_lease(task_id: str) -> str:
    return f"open/{task_id}"


@dataclass(frozen=True, slots=True)
class Extended:
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    lease_id: str
    tokens: int
    """Generated so far."""


@dataclass(frozen=True, slots=True)
class Extend(Command[Extended]):
    """A node's heartbeat: it lives, and so do these leases, as long as they get on."""

    node_id: str
    version: int
    progress: tuple[Progress, ...]
    waiting_for: str = ""
    waiting_ms: int = 0
    load_percent: int = 0
    """Of what the node may generate at once."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A trajectory that passed the door, with what the ledger decides by.

    Attributes:
        oldest, newest: Versions over its trainable tokens; None when it has none.
        tokens: Length of its response.
        largest_id: Of its token ids.
        score: What filters look at.
    """

    lease_id: str
    task_id: str
    trajectory_id: str
    index: int
    sampling: str
    oldest: int | None
    newest: int | None
    tokens: int
    largest_id: int
    score: float
    payload: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """A trajectory that did not pass: `field` is `given`, but had to be `expected`."""

    trajectory_id: str
    field: str
    given: str
    expected: str

    def __str__(self) -> str:
        return f"{self.field} = {self.given}: {self.expected}"


@dataclass(frozen=True, slots=True)
class AtTheDoor:
    """A refusal of the service, before the ledger saw the trajectory."""

    lease_id: str
    refused: Refused


@dataclass(frozen=True, slots=True)
class Pushed:
    accepted: tuple[str, ...] = ()
    duplicates: tuple[str, ...] = ()
    refused: tuple[Refused, ...] = ()
    full: bool = False
    """Over the byte budget: nothing was taken; try again when the trainer has consumed."""
    ahead: bool = False
    """Of a version that no commit has announced yet: nothing was taken; try again shortly."""


@dataclass(frozen=True, slots=True)
class Push(Command[Pushed]):
    """Stores trajectories. A refused one costs its lease an attempt.

    `patient`: a version above the published one holds the push back instead of being refused: nodes
    hold new weights a moment before the trainer commits the batch that made them.
    """

    entries: tuple[Entry, ...]
    at_the_door: tuple[AtTheDoor, ...] = ()
    patient: bool = False


@dataclass(frozen=True, slots=True)
class Partial:
    index: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class GiveBack(Command[Done]):
    """A draining node returns a lease, with what it had generated; this is no failed attempt."""

    node_id: str
    lease_id: str
    partials: tuple[Partial, ...]


@dataclass(frozen=True, slots=True)
class Fail(Command[Done]):
    node_id: str
    lease_id: str
    failure: Failure
    message: str


@dataclass(frozen=True, slots=True)
class Expired:
    count: int


@dataclass(frozen=True, slots=True)
class Expire(Command[Expired]):
    """Takes leases back from nodes that fell silent."""


# Trainers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupLease:
    """Staleness is that of the oldest trainable token, before masking."""

    task_id: str
    staleness: int
    in_flight: int
    payload_bytes: int
    mask_below: int | None = None


@dataclass(frozen=True, slots=True)
class Untrained:
    groups: int = 0
    trajectories: int = 0
    score_sum: float = 0.0


@dataclass(frozen=True, slots=True)
class BatchLeased:
    batch_id: str
    groups: tuple[GroupLease, ...]
    """All of the batch, in the order in which they were leased."""
    budget: int
    """The one that the batch is checked under: the budget when it was opened."""
    full: bool
    untrained: Untrained = field(default_factory=Untrained)
    awaited: int = 0
    """Running groups that the batch is held for: the next version would make them stale."""
    running: int = 0
    waiting: int = 0
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LeaseBatch(Command[BatchLeased]):
    """Fills the trainer's batch with complete groups, oldest first, after the dequeue check.

    A trainer has one open batch a lane; until it commits or releases it, it gets the same again.
    `batch_id` names the batch if this opens one. With `task_ids`, only these tasks; the batch is
    full when all of them are in it or have ended.
    """

    trainer_id: str
    incarnation: int
    version: int
    groups: int
    lane: Lane
    task_ids: tuple[str, ...]
    batch_id: str


@dataclass(frozen=True, slots=True)
class Payload:
    task: bytes
    trajectories: tuple[bytes, ...]
    """In order of their index."""


@dataclass(frozen=True, slots=True)
class Fetched:
    payloads: tuple[Payload, ...]


@dataclass(frozen=True, slots=True)
class Fetch(Command[Fetched]):
    """Reads what groups hold; a group that is gone reads as empty."""

    task_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    count: int


@dataclass(frozen=True, slots=True)
class Commit(Command[Committed]):
    trainer_id: str
    incarnation: int
    batch_id: str
    version: int
    tokens_trained: int = 0
    tokens_masked: int = 0
    metrics: str = ""
    """A JSON object of the step's metrics, kept as it is; empty to leave what is there."""


@dataclass(frozen=True, slots=True)
class Release(Command[Done]):
    trainer_id: str
    incarnation: int
    batch_id: str


@dataclass(frozen=True, slots=True)
class Freed:
    count: int


@dataclass(frozen=True, slots=True)
class Checkpointed(Command[Freed]):
    """Lets go of committed groups that a checkpoint of `version` covers, oldest first, at most
    `most` of them: so that nobody waits long for a checkpoint that covers thousands."""

    incarnation: int
    version: int
    most: int = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Resumed:
    incarnation: int
    restored: int


@dataclass(frozen=True, slots=True)
class Resume(Command[Resumed]):
    """A new life of the trainer at `version`. What was committed after it and what older lives had
    leased is queued again; evaluation groups also when they were committed at `version`.

    `vocabulary`: how many token ids the model knows; 0 when the trainer does not say.
    """

    trainer_id: str
    incarnation: int
    version: int
    vocabulary: int = 0


# Operators ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeReport:
    node_id: str
    version: int
    leases: int
    waiting_for: str
    waiting_ms: int
    seen_ms_ago: int
    load_percent: int


@dataclass(frozen=True, slots=True)
class Report:
    run_id: str
    version: int
    incarnation: int
    budget: int
    batch_groups: int
    groups: dict[str, int]
    """Training groups by state."""
    enqueued: int
    eval_groups: dict[str, int]
    counters: dict[str, int]
    payload_bytes: int
    nodes: tuple[NodeReport, ...]
    trainer_waiting_ms: int
    trainer_has: int
    trainer_wants: int
    oldest_queued_ms: int
    paused: bool
    draining: bool
    step_metrics: str
    """The newest that a commit brought."""


@dataclass(frozen=True, slots=True)
class Status(Command[Report]):
    """The whole picture."""


@dataclass(frozen=True, slots=True)
class BudgetSet:
    previous: int


@dataclass(frozen=True, slots=True)
class SetBudget(Command[BudgetSet]):
    budget: int
    actor: str


@dataclass(frozen=True, slots=True)
class Pause(Command[Done]):
    paused: bool
    actor: str


@dataclass(frozen=True, slots=True)
class Drain(Command[Done]):
    actor: str


@dataclass(frozen=True, slots=True)
class AuditRecord:
    at_ms: int
    actor: str
    what: str


@dataclass(frozen=True, slots=True)
class AuditRecords:
    records: tuple[AuditRecord, ...]


@dataclass(frozen=True, slots=True)
class ListAudit(Command[AuditRecords]):
    """What operators changed, newest first; the last `AUDIT_KEPT` changes are kept."""

    limit: int


@dataclass(frozen=True, slots=True)
class Inspected:
    task_id: str
    """Empty when nothing is known by that id."""
    state: str = ""
    attempts: int = 0
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Inspect(Command[Inspected]):
    """Looks up a task, or the task of a trajectory."""

    id: str


@dataclass(frozen=True, slots=True)
class DeadTask:
    task_id: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeadTasks:
    tasks: tuple[DeadTask, ...]


@dataclass(frozen=True, slots=True)
class ListDead(Command[DeadTasks]):
    limit: int


@dataclass(frozen=True, slots=True)
class Requeued:
    count: int


@dataclass(frozen=True, slots=True)
class Requeue(Command[Requeued]):
    """Gives dead tasks a fresh start; no ids: all of them."""

    task_ids: tuple[str, ...]
    actor: str
