"""Random histories: reordered, repeated and late calls, clock jumps, failures, restarts, resumes.

Every history is played on the pure ledger and on real servers at once: all must give equal answers.
A simple model, which knows nothing of leases or indexes, says what must hold: conservation, no
sample trained twice or over the budget, and every task comes to an end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, assume
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from leeway.config import OverBudget
from leeway.errors import DataError, FencedError
from tests.queue.cases import Backend, PureBackend, RedisBackend, entry, new_task, settings
from trajectory_queue import commands as c
from trajectory_queue.commands import Failure, Lane

R = TypeVar("R")

NODES = st.sampled_from(["alpha", "beta", "gamma"])
SIZE = 2


class QueueMachine(RuleBasedStateMachine):
    """Plays commands on all of `urls`' servers and on the pure ledger."""

    urls: ClassVar[dict[str, str]] = {}
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self.backends: list[Backend] = [
            PureBackend(),
            *(RedisBackend(url) for url in self.urls.values()),
        ]
        self.now = 1_000
        self.enqueued: dict[str, c.NewTask] = {}
        self.leases: list[tuple[str, str, str]] = []  # Lease, task, node: also what has ended.
        self.opens: list[c.Open] = []
        self.pushes: list[c.Push] = []
        self.requests: list[c.LeaseTasks] = []
        self.commits: list[c.Commit] = []
        self.batches: dict[str, tuple[Lane, tuple[str, ...]]] = {}  # Open ones.
        self.trained: dict[str, int] = {}  # Task -> version that it was committed at.
        self.samples: dict[tuple[str, int], c.Entry] = {}  # The newest accepted.
        self.incarnation = self.version = self.published = self.checkpoint = 0
        self.names = iter(range(10**9))

    # Playing ------------------------------------------------------------------------------------

    def apply(self, command: c.Command[R]) -> R:
        answers = [self._outcome(backend, command) for backend in self.backends]
        assert all(answer == answers[0] for answer in answers), (command, answers)
        if isinstance(answers[0], _Refusal):
            raise answers[0]
        return answers[0]

    def _outcome(self, backend: Backend, command: c.Command[R]) -> Any:
        backend.now = self.now
        try:
            return self.loop.run_until_complete(backend.apply(command))
        except (FencedError, DataError) as error:
            return _Refusal(type(error), str(error))

    def teardown(self) -> None:
        if self.enqueued:
            self._finish()
        for backend in self.backends:
            if isinstance(backend, RedisBackend):
                self.loop.run_until_complete(backend.check_payloads())
                self.loop.run_until_complete(backend.client.flushall())
                self.loop.run_until_complete(backend.client.aclose())

    @initialize(
        batch_groups=st.integers(1, 3),
        budget=st.integers(0, 2),
        over_budget=st.sampled_from(OverBudget),
        max_reissues=st.integers(0, 1),
        max_attempts=st.integers(1, 3),
        filter_equal_scores=st.booleans(),
        min_group=st.sampled_from([None, 1]),
        filter_longer_than=st.sampled_from([None, 6]),
        patience_ms=st.sampled_from([0, 2_000]),
        stall_ms=st.sampled_from([900, 100_000]),
        max_bytes=st.sampled_from([60, 1 << 20]),
        tasks=st.integers(1, 8),
    )
    def start(self, tasks: int, **changes: Any) -> None:
        self.settings = settings(**changes)
        self.apply(c.Configure(self.settings))
        self._resume(0)
        self.enqueue(tasks, Lane.TRAIN)

    @rule(count=st.integers(1, 4), lane=st.sampled_from([Lane.TRAIN, Lane.TRAIN, Lane.EVAL]))
    def enqueue(self, count: int, lane: Lane) -> None:
        first = len(self.enqueued)
        tasks = tuple(new_task(first + n, lane=lane, size=SIZE) for n in range(count))
        again = tuple(self.enqueued.values())[-1:]
        added = self.apply(c.Enqueue(self.incarnation, tasks + again))
        assert (added.accepted, added.duplicates) == (count, len(again))
        self.enqueued.update({task.task_id: task for task in tasks})

    @rule(node=NODES, lag=st.integers(0, 2), most=st.integers(0, 5))
    def lease(self, node: str, lag: int, most: int) -> None:
        version = max(0, self.version - lag)
        command = c.LeaseTasks(node, version, most, f"request-{next(self.names)}")
        self.requests.append(command)
        lanes = self._lease(command)
        report = self.apply(c.Status())
        if Lane.TRAIN in lanes:
            assert _outstanding(report) <= (report.budget + 1) * report.batch_groups

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def lease_again(self, data: st.DataObject) -> None:
        self._lease(data.draw(st.sampled_from(self.requests[-3:])))

    def _lease(self, command: c.LeaseTasks) -> set[Lane]:
        leased = self.apply(command)
        lanes = set()
        for lease in leased.leases:
            task = next(t for t in self.enqueued.values() if _leases(t, lease))
            assert not task.external
            lanes.add(task.lane)
            self.leases.append((lease.lease_id, task.task_id, command.node_id))
            for key in self._samples_of(task.task_id):  # What a drop or a death discarded.
                if key[1] not in lease.done:
                    del self.samples[key]
        return lanes

    @rule(node=NODES, lag=st.integers(0, 2), min_version=st.sampled_from([0, 0, 1]))
    def open_task(self, node: str, lag: int, min_version: int) -> None:
        version = max(0, self.version - lag)
        number = 1_000 + next(self.names)
        task = new_task(number, size=SIZE, external=True, min_version=min_version)
        self.opens.append(c.Open(node, version, task))
        before = self.apply(c.Status())
        opened = self.apply(self.opens[-1])
        after = self.apply(c.Status())
        assert after.enqueued == before.enqueued + len(opened.leases)
        if opened.leases:
            self.enqueued[task.task_id] = task
            self.leases.append((opened.leases[0].lease_id, task.task_id, node))
            assert _outstanding(after) <= (after.budget + 1) * after.batch_groups

    @precondition(lambda self: self.opens)
    @rule(data=st.data())
    def open_again(self, data: st.DataObject) -> None:
        """A repeated call gives the lease that is still held, and never a second attempt."""
        command = data.draw(st.sampled_from(self.opens[-3:]))
        known = command.task.task_id in self.enqueued
        opened = self.apply(command)
        if not known and opened.leases:
            self.enqueued[command.task.task_id] = command.task
            lease_id = opened.leases[0].lease_id
            self.leases.append((lease_id, command.task.task_id, command.node_id))
        elif known:
            assert opened.leases or opened.wait is c.Wait.KNOWN
        assert all(lease.attempt == 1 for lease in opened.leases)

    @precondition(lambda self: self.leases)
    @rule(
        data=st.data(),
        indices=st.sampled_from([(0,), (1,), (0, 1), (1, 0), (0, 2)]),
        scores=st.tuples(st.sampled_from([0.1, 0.7]), st.sampled_from([0.1, 0.7])),
        age=st.integers(-1, 3),
        span=st.integers(0, 2),
        patient=st.booleans(),
        door=st.booleans(),
    )
    def push(
        self,
        data: st.DataObject,
        indices: tuple[int, ...],
        scores: tuple[float, float],
        age: int,
        span: int,
        patient: bool,
        door: bool,
    ) -> None:
        lease_id, task_id, _ = data.draw(st.sampled_from(self.leases[-8:]))
        newest = max(0, self.published - age)
        oldest = max(0, newest - span)
        entries = tuple(
            entry(
                lease_id,
                task_id,
                index,
                oldest=oldest,
                newest=newest,
                score=scores[index % 2],
                tokens=5 + span,
                largest_id=newest,
                payload=f"{task_id}/{index}/{next(self.names)}".encode(),
            )
            for index in indices
        )
        refused = c.Refused("odd", "logprobs", "nan", "they must be finite")
        doors = (c.AtTheDoor(lease_id, refused),) if door and age == 3 else ()
        self.pushes.append(c.Push(entries, doors, patient))
        self._push(self.pushes[-1])

    @precondition(lambda self: self.pushes)
    @rule(data=st.data())
    def push_again(self, data: st.DataObject) -> None:
        self._push(data.draw(st.sampled_from(self.pushes[-5:])))

    def _push(self, command: c.Push) -> None:
        pushed = self.apply(command)
        for item in command.entries:
            if item.trajectory_id in pushed.accepted:
                self.samples[item.task_id, item.index] = item

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), failure=st.sampled_from(Failure))
    def fail(self, data: st.DataObject, failure: Failure) -> None:
        lease_id, _, node = data.draw(st.sampled_from(self.leases[-8:]))
        self.apply(c.Fail(node, lease_id, failure, "it broke"))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), indices=st.sets(st.integers(0, 2)))
    def give_back(self, data: st.DataObject, indices: set[int]) -> None:
        lease_id, _, node = data.draw(st.sampled_from(self.leases[-8:]))
        partials = tuple(c.Partial(index, b"so far" * (index + 1)) for index in sorted(indices))
        self.apply(c.GiveBack(node, lease_id, partials))

    @rule(node=NODES, tokens=st.integers(0, 2))
    def extend(self, node: str, tokens: int) -> None:
        held = tuple(
            c.Progress(lease_id, tokens) for lease_id, _, owner in self.leases[-8:] if owner == node
        )
        self.apply(c.Extend(node, self.version, held, "weights", 10, 50))

    @rule(step=st.sampled_from([-5_000, 10, 400, 1_100, 700_000]))
    def time_passes(self, step: int) -> None:
        self.now = max(0, self.now + step)
        self.apply(c.Expire())

    @rule(groups=st.integers(1, 3))
    def lease_batch(self, groups: int) -> None:
        self._lease_batch(Lane.TRAIN, groups, ())

    @rule(data=st.data())
    def lease_evaluation(self, data: st.DataObject) -> None:
        names = [task.task_id for task in self.enqueued.values() if task.lane is Lane.EVAL]
        assume(names)
        wanted = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        self._lease_batch(Lane.EVAL, 0, tuple(wanted))

    def _lease_batch(self, lane: Lane, groups: int, task_ids: tuple[str, ...]) -> c.BatchLeased:
        batch = self.apply(
            c.LeaseBatch(
                "trainer",
                self.incarnation,
                self.version,
                groups,
                lane,
                task_ids,
                f"batch-{next(self.names)}",
            )
        )
        names = tuple(group.task_id for group in batch.groups)
        _, before = self.batches.get(batch.batch_id, (lane, ()))
        assert names[: len(before)] == before
        self.batches[batch.batch_id] = (lane, names)
        assert not set(names) & set(self.trained)
        for group in batch.groups:
            self._check_budget(group, batch)
        fetched = self.apply(c.Fetch(names))
        for name, payload in zip(names, fetched.payloads, strict=True):
            held = [self.samples[key].payload for key in self._samples_of(name)]
            assert payload == c.Payload(self.enqueued[name].payload, tuple(held))
        return batch

    def _check_budget(self, group: c.GroupLease, batch: c.BatchLeased) -> None:
        oldest = min(self.samples[key].oldest for key in self._samples_of(group.task_id))
        assert group.staleness == self.version - oldest
        if self.enqueued[group.task_id].lane is Lane.EVAL:
            return
        limit = self.version - batch.budget
        if self.settings.over_budget is not OverBudget.KEEP:
            assert oldest >= limit or group.mask_below == limit

    def _samples_of(self, task_id: str) -> list[tuple[str, int]]:
        return sorted(key for key in self.samples if key[0] == task_id)

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), skip=st.integers(0, 2))
    def commit(self, data: st.DataObject, skip: int) -> None:
        batch_id = data.draw(st.sampled_from(sorted(self.batches)))
        self.commits.append(
            c.Commit("trainer", self.incarnation, batch_id, self.version + skip, 10, 1, '{"a": 1}')
        )
        self._commit(self.commits[-1])

    def _commit(self, command: c.Commit) -> None:
        lane, names = self.batches[command.batch_id]
        if lane is Lane.TRAIN and command.version <= self.version:
            assert self._error_of(command).kind is DataError
            return
        assert self.apply(command).count == len(names)
        if lane is Lane.TRAIN:
            self.version = command.version
            self.published = max(self.published, self.version)
        self.trained.update(dict.fromkeys(names, self.version))
        del self.batches[command.batch_id]

    @precondition(lambda self: self.commits)
    @rule(data=st.data())
    def commit_again(self, data: st.DataObject) -> None:
        """A repeated commit says the same, or is refused; it never counts twice."""
        command = data.draw(st.sampled_from(self.commits[-3:]))
        if command.batch_id not in self.batches:
            before = self.apply(c.Status())
            with contextlib.suppress(_Refusal):
                self.apply(command)
            assert self.apply(c.Status()).groups == before.groups

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        batch_id = data.draw(st.sampled_from(sorted(self.batches)))
        self.apply(c.Release("trainer", self.incarnation, batch_id))
        del self.batches[batch_id]

    @rule(lag=st.integers(0, 2), most=st.sampled_from([1, 3, 1000]))
    def checkpointed(self, lag: int, most: int) -> None:
        self.checkpoint = max(self.checkpoint, self.version - lag)
        assert self.apply(c.Checkpointed(self.incarnation, self.checkpoint, most)).count <= most

    @rule(lag=st.integers(0, 3))
    def resume(self, lag: int) -> None:
        self._resume(max(self.checkpoint, self.version - lag))

    def _resume(self, version: int) -> None:
        resumed = self.apply(c.Resume("trainer", 0, version, vocabulary=20))
        self.incarnation, self.version = resumed.incarnation, version
        self.published = max(self.published, version)
        self.batches.clear()
        for task_id, committed in list(self.trained.items()):
            if committed > version - (self.enqueued[task_id].lane is Lane.EVAL):
                del self.trained[task_id]

    @precondition(lambda self: self.incarnation > 1)
    @rule()
    def an_old_life_wakes_up(self) -> None:
        old = self.incarnation - 1
        for command in (
            c.LeaseBatch("trainer", old, self.version, 1, Lane.TRAIN, (), "late"),
            c.Commit("trainer", old, "late", self.version + 1),
            c.Checkpointed(old, self.version + 1),
        ):
            assert self._error_of(command).kind is FencedError

    def _error_of(self, command: c.Command[Any]) -> _Refusal:
        try:
            self.apply(command)
        except _Refusal as refusal:
            return refusal
        raise AssertionError(f"{command} was not refused")

    @rule(budget=st.integers(0, 3))
    def set_budget(self, budget: int) -> None:
        self.apply(c.SetBudget(budget, "operator"))

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.apply(c.Pause(paused, "operator"))

    @rule()
    def requeue(self) -> None:
        dead = self.apply(c.ListDead(100)).tasks
        own = [task for task in dead if not self.enqueued[task.task_id].external]
        assert self.apply(c.Requeue((), "operator")).count == len(own)

    @rule(data=st.data())
    def inspect(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.enqueued)))
        self.apply(c.Inspect(name))
        self.apply(c.Inspect(f"{name}/0"))

    @rule(changed=st.booleans())
    def the_service_restarts(self, changed: bool) -> None:
        if changed:
            self.settings = replace(self.settings, budget=(self.settings.budget + 1) % 3)
        self.apply(c.Configure(self.settings))

    # What must hold -------------------------------------------------------------------------------

    @invariant()
    def conservation(self) -> None:
        if not self.enqueued:
            return
        report = self.apply(c.Status())
        lanes = {lane: sum(task.lane is lane for task in self.enqueued.values()) for lane in Lane}
        assert sum(report.groups.values()) == report.enqueued == lanes[Lane.TRAIN]
        assert sum(report.eval_groups.values()) == lanes[Lane.EVAL]
        assert min(report.groups.values()) >= 0
        committed = report.groups["committed"] + report.eval_groups["committed"]
        assert committed == len(self.trained)
        assert report.payload_bytes >= 0

    def _finish(self) -> None:
        """Whatever happened, a well-behaved fleet and trainer bring the run to its end."""
        self.apply(c.Pause(False, "operator"))
        for batch_id in sorted(self.batches):
            self.apply(c.Release("trainer", self.incarnation, batch_id))
        self.batches.clear()
        for _ in range(60 + 4 * len(self.enqueued)):
            self.now = self.now + 1_100
            self.apply(c.Expire())
            leased = self.apply(
                c.LeaseTasks("node", self.version, 100, f"request-{next(self.names)}")
            )
            for lease in leased.leases:
                self._complete(lease)
            self._train(Lane.TRAIN)
            self._train(Lane.EVAL)
            report = self.apply(c.Status())
            if _unfinished(report.groups) == _unfinished(report.eval_groups) == 0:
                break
        else:
            raise AssertionError(f"the run does not end: {report}")
        self.apply(c.Checkpointed(self.incarnation, self.version + 1))
        assert self.apply(c.Status()).payload_bytes == 0

    def _complete(self, lease: c.TaskLease) -> None:
        task = next(t for t in self.enqueued.values() if _leases(t, lease))
        items = (
            entry(lease.lease_id, task.task_id, index, version=self.version)
            for index in range(SIZE)
            if index not in lease.done
        )
        self._push(c.Push(tuple(items)))

    def _train(self, lane: Lane) -> None:
        groups = self.apply(c.Status())
        ready = (groups.groups if lane is Lane.TRAIN else groups.eval_groups)["queued"]
        if ready:
            batch = self._lease_batch(lane, ready, ())
            self._commit(c.Commit("trainer", self.incarnation, batch.batch_id, self.version + 1))


class _Refusal(Exception):  # noqa: N818 - what a command answered
    def __init__(self, kind: type[Exception], message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Refusal) and (self.kind, str(self)) == (other.kind, str(other))

    def __hash__(self) -> int:
        return hash((self.kind, str(self)))


def _leases(task: c.NewTask, lease: c.TaskLease) -> bool:
    return task.payload == lease.task


def _outstanding(report: c.Report) -> int:
    return sum(report.groups[state] for state in ("running", "queued", "leased"))


def _unfinished(groups: dict[str, int]) -> int:
    return sum(groups[state] for state in ("waiting", "running", "queued", "leased"))


def _settings(examples: int) -> hypothesis_settings:
    return hypothesis_settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        report_multiple_bugs=False,
        # Shrinking a history takes minutes: add Phase.shrink by hand to study a failure.
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_histories_on_the_pure_ledger(loop: asyncio.AbstractEventLoop) -> None:
    machine = type("PureMachine", (QueueMachine,), {"loop": loop})
    run_state_machine_as_test(machine, settings=_settings(150))


def test_servers_equal_the_ledger(
    loop: asyncio.AbstractEventLoop, redis_urls: dict[str, str]
) -> None:
    machine = type("ServerMachine", (QueueMachine,), {"loop": loop, "urls": redis_urls})
    run_state_machine_as_test(machine, settings=_settings(60))
