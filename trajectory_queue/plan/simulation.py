"""A run in virtual time: nodes and a trainer around the real ledger.

What may be generated, who gets which batch, and what is masked or dropped is decided by the ledger
that is the specification of the queue service (`trajectory_queue.ledger`), by its own commands.
This module only says when they are sent, as the node's and the trainer's loops do:

- a node asks for as many groups as fit, again after each answer that makes room; refused, it waits
  until something changes or it has the weights that it needs; with a budget of 0 it asks only when
  idle;
- the trainer keeps twice the capacity waiting, leases, learns, publishes, commits.

Heartbeats are left out: leases do not expire by the clock, but fail when a node that died has been
silent for `lease_seconds`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from leeway.config import UpdateMode
from leeway.errors import DeadlineError
from trajectory_queue import commands as c
from trajectory_queue.commands import Lane, Wait
from trajectory_queue.ledger import Ledger
from trajectory_queue.plan.fleet import Held, Node, Sequence
from trajectory_queue.plan.outcome import Outcome, Step, measure
from trajectory_queue.plan.profile import Profile
from trajectory_queue.plan.workload import Work, Workload

_NEVER_MS = 1 << 60
_CHECKPOINT_EVERY = 10
# As the service does.
_RECHECK_SECONDS, _AHEAD_SECONDS = 5.0, 0.1
_FEED_SECONDS = 0.5
# A simulation in which so much time passes without a step is stuck.
_PATIENCE_SECONDS = 30 * 86400.0


@dataclass(slots=True)
class _Group:
    samples: list[Work]
    signal: bool
    done: dict[int, dict[int, float]]
    """Tokens by version, of each pushed sample."""


def simulate(
    profile: Profile,
    *,
    steps: int = 60,
    seed: int = 0,
    warmup: int | None = None,
    on_step: Callable[[Simulation, Step], None] | None = None,
) -> Outcome:
    """Runs a profile for so many optimizer steps after the warm-up.

    Args:
        warmup: Steps that are not measured; by default until the budget's worth has been consumed.
        on_step: Called after each step; it may change the budget (`Simulation.set_budget`).

    Raises:
        DeadlineError: no batch came together within a month of virtual time.
    """
    warmup = profile.budget + 2 if warmup is None else warmup
    return Simulation(profile, seed).run(steps + warmup, warmup, on_step)


class Simulation:
    """One run; see the module's docstring."""

    def __init__(self, profile: Profile, seed: int = 0) -> None:
        self.profile = profile
        self.budget = profile.budget
        self.version = 0
        self.steps: list[Step] = []
        self._workload = Workload(profile, seed)
        self._ledger = Ledger()
        self._random = np.random.default_rng([seed, 1])
        self._nodes = [Node(n, profile.rollouts) for n in range(profile.rollouts.nodes)]
        self._idle: deque[Node] = deque()
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._counter = itertools.count()
        self._now = 0.0
        self._position = 0
        self._waiting = 0
        """Groups that nobody has leased, as far as the trainer's feeder knows."""
        self._groups: dict[str, _Group] = {}
        self._waiting_since: float | None = None
        self._missing = 0
        self._full = False
        """As many groups are outstanding as may be, when a node last asked."""
        self._dropped_tokens = 0
        self._target = 0
        self._apply(c.Configure(self._settings()))
        self._incarnation = self._apply(c.Resume("trainer", 0, 0)).incarnation

    # Running --------------------------------------------------------------------------------------

    def run(
        self, steps: int, warmup: int, on_step: Callable[[Simulation, Step], None] | None = None
    ) -> Outcome:
        self._on_step = on_step
        self._target = steps
        self._feed()
        for node in self._nodes:
            self._after(0.0, self._ask, node)
            self._schedule_failure(node)
        self._after(0.0, self._lease_batch)
        while len(self.steps) < steps:
            at, _, action, arguments = heapq.heappop(self._events)
            self._now = at
            action(*arguments)
            last = self.steps[-1].ended if self.steps else 0.0
            if at - last > _PATIENCE_SECONDS or not self._events:
                raise DeadlineError(
                    f"profile {self.profile.name}: no batch came together after step "
                    f"{len(self.steps)}; are rollouts.nodes x concurrency and the budget enough?"
                )
        for node in self._nodes:
            node.advance(self._now)
        return measure(
            self.steps,
            warmup=warmup,
            busy_seconds=sum(node.busy_seconds for node in self._nodes),
            slot_seconds=sum(node.slot_seconds for node in self._nodes),
            span=self._now,
            nodes=len(self._nodes),
            slots=self.profile.rollouts.concurrency,
            dropped_tokens=self._dropped_tokens,
        )

    def set_budget(self, budget: int) -> None:
        """What an operator, or the controller, does to a running run."""
        self._apply(c.SetBudget(budget, "plan"))
        self.budget = budget
        self._feed()
        self._wake()

    def _apply(self, command: c.Command[Any]) -> Any:
        return self._ledger.apply(command, int(self._now * 1000.0))

    def _after(self, seconds: float, action: Callable[..., object], *arguments: Any) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._counter), action, arguments))

    def _settings(self) -> c.Settings:
        profile = self.profile
        return c.Settings(
            run_id="plan",
            batch_groups=profile.queued_batch_groups,
            budget=profile.budget,
            over_budget=profile.over_budget,
            max_reissues=profile.max_reissues,
            lease_ms=_NEVER_MS,
            stall_ms=_NEVER_MS,
            max_bytes=_NEVER_MS,
            patience_ms=int(profile.patience_seconds * 1000),
            # A node's failure is not the task's fault at any rate that is worth planning for.
            max_attempts=1000,
        )

    # The rollout side -----------------------------------------------------------------------------

    def _ask(self, node: Node) -> Wait:
        """A node's request for tasks, unless it waits for the answer to one; returns why it was
        given nothing."""
        size = self.profile.queued_group_size
        room = (self.profile.rollouts.concurrency - node.unfinished) // size
        if node.waits or not node.alive or node.pending is not None or room < 1:
            return Wait.NONE
        if self.budget == 0 and node.unfinished:
            return Wait.NONE
        leased = self._apply(
            c.LeaseTasks(node.node_id, node.version, room, str(next(self._counter)))
        )
        self._waiting -= len(leased.leases)
        self._full = leased.outstanding >= leased.capacity
        node.advance(self._now)
        for lease in leased.leases:
            self._start(node, lease)
        if leased.leases:
            self._announce_end(node)
        if len(leased.leases) < room:
            node.waits = True
            self._idle.append(node)
            if self._waiting <= 0:
                # Groups that end untrained may use up all that waits before the next step.
                self._after(_FEED_SECONDS, self._feed_if_empty)
        return Wait(leased.wait)

    def _wake(self) -> None:
        """Something changed: those who wait ask again, until one is refused."""
        for _ in range(len(self._idle)):
            node = self._idle.popleft()
            node.waits = False
            if self._ask(node) not in (Wait.NONE, Wait.VERSION):
                break

    def _ask_again(self, node: Node) -> None:
        """The node is another than the one that was refused."""
        if node.waits:
            self._idle.remove(node)
            node.waits = False
        self._ask(node)

    def _start(self, node: Node, lease: c.TaskLease) -> None:
        task_id = lease.task.decode()
        group = self._groups[task_id]
        todo = [index for index in range(len(group.samples)) if index not in lease.done]
        held = Held(lease.lease_id, task_id, lease.attempt, len(todo))
        node.held[held.lease_id] = held
        node.unfinished += len(todo)
        for index in todo:
            self._begin_part(node, Sequence(held, index, group.samples[index]))

    def _begin_part(self, node: Node, sequence: Sequence) -> None:
        if sequence.part.away_seconds > 0.0:
            self._after(sequence.part.away_seconds, self._back, node, sequence)
        else:
            node.decode(sequence)

    def _back(self, node: Node, sequence: Sequence) -> None:
        """A tool has answered, or the prompt is read."""
        if not sequence.held.ended:
            node.advance(self._now)
            node.decode(sequence)
            self._announce_end(node)

    def _announce_end(self, node: Node) -> None:
        node.stamp += 1
        ends = node.next_end()
        if ends is not None:
            self._after(ends - self._now, self._part_ended, node, node.stamp)

    def _part_ended(self, node: Node, stamp: int) -> None:
        if stamp != node.stamp:
            return
        node.advance(self._now)
        for sequence in list(node.ended()):
            if sequence.held.ended:
                continue
            sequence.at += 1
            if sequence.at < len(sequence.work.parts):
                self._begin_part(node, sequence)
            else:
                self._finish(node, sequence)
        if node.pending is not None and node.unfinished == 0:
            self._swap(node, node.pending)
        self._announce_end(node)
        self._ask(node)

    def _finish(self, node: Node, sequence: Sequence) -> None:
        held = sequence.held
        if sequence.work.fails and held.attempt == 1:
            self._fail(node, held, c.Failure.REWARD)
            return
        node.unfinished -= 1
        held.open -= 1
        if held.open == 0:
            node.held.pop(held.lease_id, None)
        self._push(sequence)

    def _push(self, sequence: Sequence) -> None:
        held, index = sequence.held, sequence.index
        group = self._groups.get(held.task_id)
        if group is None:
            return
        entry = c.Entry(
            lease_id=held.lease_id,
            task_id=held.task_id,
            trajectory_id=f"{held.task_id}/{index}",
            index=index,
            sampling="",
            oldest=min(sequence.versions),
            newest=max(sequence.versions),
            tokens=round(sequence.work.tokens),
            largest_id=0,
            score=float(index % 2) if group.signal else 0.0,
            payload=b"",
        )
        pushed = self._apply(c.Push((entry,), patient=True))
        if pushed.ahead:
            self._after(_AHEAD_SECONDS, self._push, sequence)
            return
        group.done[index] = sequence.versions
        if len(group.done) == len(group.samples):
            self._completed(held.task_id, group)

    def _completed(self, task_id: str, group: _Group) -> None:
        if not group.signal and len(group.samples) > 1:
            del self._groups[task_id]
            self._wake()
        elif self._waiting_since is not None:
            self._missing -= 1
            if self._missing <= 0:
                self._lease_batch()

    def _fail(self, node: Node, held: Held, failure: c.Failure) -> None:
        node.drop(held)
        self._apply(c.Fail(node.node_id, held.lease_id, failure, ""))
        self._wake()

    # New weights, and nodes that die --------------------------------------------------------------

    def _offer(self, node: Node, version: int) -> None:
        if not node.alive or version <= node.version:
            return
        node.advance(self._now)
        if self.profile.rollouts.update_mode is UpdateMode.DRAIN and node.unfinished:
            node.pending = version
            return
        self._swap(node, version)
        self._announce_end(node)
        self._ask_again(node)

    def _swap(self, node: Node, version: int) -> None:
        rollouts = self.profile.rollouts
        still = rollouts.pause_seconds
        if rollouts.update_mode is UpdateMode.RECOMPUTE:
            still += node.generated_tokens() * rollouts.read_seconds
        node.swap(version, still)

    def _schedule_failure(self, node: Node) -> None:
        hours = self.profile.rollouts.hours_between_failures
        if hours is not None:
            self._after(float(self._random.exponential(hours * 3600.0)), self._die, node)

    def _die(self, node: Node) -> None:
        node.advance(self._now)
        node.alive = False
        node.pending = None
        for held in list(node.held.values()):
            # The queue hears nothing for so long; then others get the group.
            self._after(self.profile.lease_seconds, self._expire, node, held)
            node.drop(held)
        node.stamp += 1
        self._after(self.profile.rollouts.restart_seconds, self._revive, node)

    def _expire(self, node: Node, held: Held) -> None:
        self._apply(c.Fail(node.node_id, held.lease_id, c.Failure.INFRASTRUCTURE, "silent"))
        self._wake()

    def _revive(self, node: Node) -> None:
        node.alive = True
        node.advance(self._now)
        if self.version > node.version:
            node.swap(self.version, 0.0)
        self._schedule_failure(node)
        self._ask_again(node)

    # The trainer ----------------------------------------------------------------------------------

    def _feed(self) -> None:
        report = self._apply(c.Status())
        wanted = 2 * (self.budget + 1) * self.profile.queued_batch_groups
        tasks = []
        for sequence in range(self._position, self._position + wanted - report.groups["waiting"]):
            samples, signal = self._workload.group(sequence)
            task_id = f"{sequence:09d}"
            self._groups[task_id] = _Group(samples, signal, {})
            size = len(samples)
            tasks.append(c.NewTask(task_id, sequence, Lane.TRAIN, size, "", 0, task_id.encode()))
        self._position += len(tasks)
        self._waiting = report.groups["waiting"] + len(tasks)
        self._apply(c.Enqueue(self._incarnation, tuple(tasks)))
        dropped = report.counters.get("dropped_tokens", 0)
        self._dropped_tokens = dropped

    def _feed_if_empty(self) -> None:
        if self._waiting <= 0:
            self._feed()
            self._wake()

    def _lease_batch(self) -> None:
        if self._waiting_since is None:
            self._waiting_since = self._now
        groups = self.profile.queued_batch_groups
        batch = self._apply(
            c.LeaseBatch(
                "trainer", self._incarnation, self.version, groups, Lane.TRAIN, (), str(self._now)
            )
        )
        # What was dropped as stale has made room.
        self._wake()
        if not batch.full:
            self._missing = max(1, groups - len(batch.groups) - batch.awaited)
            if batch.awaited:
                self._after(_RECHECK_SECONDS, self._look_again, self.version)
            return
        waited = self._now - self._waiting_since
        self._waiting_since = None
        self._learn(batch, waited)

    def _look_again(self, version: int) -> None:
        if self._waiting_since is not None and version == self.version:
            self._lease_batch()

    def _learn(self, batch: c.BatchLeased, waited: float) -> None:
        tokens, masked = self._staleness(batch)
        trainer = self.profile.trainer
        learned = trainer.step_seconds(float(tokens.sum())) + trainer.publish_seconds
        step = Step(
            ended=self._now + learned + trainer.call_seconds,
            waited_seconds=waited,
            at_budget=self._full,
            learned_seconds=learned,
            tokens=float(tokens.sum()),
            masked_tokens=masked,
            generated_tokens=float(tokens.sum()) + masked,
            staleness=tokens,
        )
        self._after(learned - trainer.publish_seconds, self._publish)
        self._after(learned + trainer.call_seconds, self._commit, batch, step)

    def _staleness(self, batch: c.BatchLeased) -> tuple[npt.NDArray[np.float64], float]:
        """Trained tokens by staleness, and how many are masked."""
        by_age: dict[int, float] = {}
        masked = 0.0
        for leased in batch.groups:
            for versions in self._groups[leased.task_id].done.values():
                for version, tokens in versions.items():
                    if leased.mask_below is not None and version < leased.mask_below:
                        masked += tokens
                    else:
                        age = self.version - version
                        by_age[age] = by_age.get(age, 0.0) + tokens
        histogram = np.zeros(max(by_age, default=0) + 1)
        for age, tokens in by_age.items():
            histogram[age] = tokens
        return histogram, masked

    def _publish(self) -> None:
        rollouts, version = self.profile.rollouts, self.version + 1
        for node in self._nodes:
            self._after(rollouts.update_seconds, self._offer, node, version)

    def _commit(self, batch: c.BatchLeased, step: Step) -> None:
        self.version += 1
        self._apply(
            c.Commit("trainer", self._incarnation, batch.batch_id, self.version, round(step.tokens))
        )
        for leased in batch.groups:
            del self._groups[leased.task_id]
        if self.version % _CHECKPOINT_EVERY == 0:
            self._apply(c.Checkpointed(self._incarnation, self.version))
        self.steps.append(step)
        self._feed()
        if self._on_step is not None:
            self._on_step(self, step)
        self._wake()
        self._lease_batch()
