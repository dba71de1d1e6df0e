"""The trainer's loop: lease a batch, learn from it, publish the new policy, commit, checkpoint.

`Trainer.run` is the whole story on one screen. Tensor work happens in a thread of its own; the
event loop keeps talking to the queue meanwhile. What must hold:

- The policy version is the number of batches learned from; it goes up by one a batch, is published
  before the batch is committed, and only committed batches free their places. So also while only
  the critic learns: nodes that kept the older version's name would fall behind the budget.
- Nothing that the queue hands out is trained over the budget: it has masked or dropped what is, and
  the loop checks that once more.
- A life that resumes trains again on what was consumed after its checkpoint, but hands nothing out
  before it is where the last life was: nodes hold those weights, and generate with them.
- A stop takes effect at once, also in the middle of a forward pass: gradients change nothing that a
  checkpoint holds, and the optimizer is kept out while it is written. Only a batch that has changed
  weights is finished first.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import structlog

from leeway.config import Config, OverBudget
from leeway.errors import LeewayError
from leeway.health import HEALTH
from leeway.tasks import Sampler
from leeway.telemetry import Spans
from leeway.traces import TRACES
from leeway.trajectory import Group, Purpose
from leeway.versions import capacity
from trainer_service.canary import CanaryText
from trainer_service.checkpoint import Checkpoints
from trainer_service.learn import Learned, learn
from trainer_service.learners import Learners
from trainer_service.record import Record, StepTimes, numbers
from trainer_service.weight_broadcast.publisher import WeightPublisher
from trajectory_queue.autobudget import BudgetController, Observation
from trajectory_queue.client import Batch, TrainerQueue

log = structlog.get_logger(__name__)

T = TypeVar("T")

# Tasks that wait in the queue, in multiples of what the budget lets nodes work on: filtered groups
# are replaced from them at once.
_WAITING_CAPACITIES = 2
_FEED_SECONDS = 0.5


class Stopped(Exception):  # noqa: N818 - not an error
    """The process was asked to end."""


@dataclass(slots=True)
class Position:
    """Where a run is: with the weights and the optimizer, all that a checkpoint holds."""

    version: int = 0
    sampler: dict[str, int] = field(default_factory=dict)
    evaluated: list[str] = field(default_factory=list)


class Trainer:
    """The parts of a training run, wired by `main`."""

    def __init__(
        self,
        config: Config,
        learners: Learners,
        sampler: Sampler,
        queue: TrainerQueue,
        start_publisher: Callable[[int], WeightPublisher],
        canary: CanaryText,
        checkpoints: Checkpoints,
        record: Record,
        spans: Spans,
    ) -> None:
        """`start_publisher` is called once, with this life's incarnation."""
        self._config = config
        self._learners = learners
        self._sampler = sampler
        self._queue = queue
        self._start_publisher = start_publisher
        self._canary = canary
        self._checkpoints = checkpoints
        self._record = record
        self._spans = spans
        self._position = Position()
        self._saved_version = -1
        # What earlier lives have published, and how far of it this one comes by itself: until then
        # nothing is new to the nodes.
        self._published_before = self._replayed_to = 0
        self._checked_engine = False
        self._stop = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "compute")
        self._writing: asyncio.Task[None] | None = None
        # Held while the optimizer changes weights.
        self._gate = threading.Lock()
        # Whether weights have changed since `_position.version`, and whether none may any more.
        self._changed = self._frozen = False
        auto = config.staleness.budget == "auto"
        self._tuner = BudgetController(config.staleness.auto) if auto else None
        # Whether as many groups were outstanding as may be, when the feeder last looked.
        self._at_budget = False

    async def run(self, stop: asyncio.Event) -> None:
        """Trains until `trainer.steps` batches are done or `stop` is set; leaves a checkpoint."""
        self._stop = stop
        self._publisher = await self._resume()
        with self._publisher:
            try:
                # First of all: evaluation and training never share an engine's batch by chance.
                if await self._evaluate("before"):
                    # Nodes cannot go back to a version to do it again.
                    await self._checkpoint()
                    await self._written()
                async with asyncio.TaskGroup() as tasks:
                    feeder = tasks.create_task(self._feed())
                    while self._position.version < self._config.trainer.steps:
                        await self._step()
                    await self._evaluate("after")
                    feeder.cancel()
            except* Stopped:
                await self._checkpoint_at_stop()
            else:
                await self._checkpoint()
                await self._written()
                await self._queue.drain()

    async def _step(self) -> None:
        """One batch: lease, learn, publish, commit, and now and then checkpoint."""
        times = StepTimes()
        with self._spans.span("lease"), times.measure("wait"):
            batch = await self._lease()
        waited_at_budget = self._at_budget
        leased = time.time()
        with self._spans.span("learn"), times.measure("step"):
            learned = await self._learned(batch.groups)
        self._position.version += 1
        self._changed = False
        with self._spans.span("publish"), times.measure("publish"):
            # A life that ends leaves it to the next one.
            if self._position.version >= self._replayed_to and not self._stop.is_set():
                await self._publish()
        await self._fill()
        row = self._record.measure(self._position.version, batch, learned, times)
        await self._queue.commit(
            batch,
            version=self._position.version,
            tokens_trained=sum(plan.trained_tokens for plan in learned.plans),
            metrics=numbers(row),
        )
        for group in batch.groups:
            TRACES.span(group.task.task_id, "learn", leased, version=self._position.version)
        self._record.step(row, batch, learned)
        await self._tune(Observation(batch.budget, times.waiting_share, waited_at_budget, row))
        if self._position.version % self._config.trainer.checkpoint_every == 0:
            await self._checkpoint()
        elif self._writing is not None and self._writing.done():
            await self._written()

    # Learning ------------------------------------------------------------------------------------

    async def _learned(self, groups: Sequence[Group]) -> Learned:
        """Learns from one batch.

        Raises:
            Stopped: asked to end before its first optimizer step; weights change no more.
        """
        computing = asyncio.ensure_future(self._compute(self._learn, groups))
        try:
            return await self._unless_stopped(asyncio.shield(computing))
        except Stopped:
            if await asyncio.to_thread(self._freeze):
                # Ends where it would change weights; until then nobody listens.
                computing.add_done_callback(asyncio.Future.exception)
                raise
            return await computing

    def _freeze(self) -> bool:
        """Keeps the optimizer from a batch that it has not begun; whether there is none begun."""
        with self._gate:
            self._frozen = not self._changed
            return self._frozen

    def _learn(self, groups: Sequence[Group]) -> Learned:
        """In the compute thread."""
        learned = learn(
            groups,
            self._config,
            self._learners,
            self._position.version,
            self._changing,
            check_engine=not self._checked_engine and self._is_own_version,
        )
        self._checked_engine = self._checked_engine or learned.checked_engine
        return learned

    @property
    def _is_own_version(self) -> bool:
        """Whether nodes have the present version from this life: an earlier one, killed between
        publishing and committing, may have come to the same number by another batch."""
        return not 0 < self._position.version <= self._published_before

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Around each optimizer step of a batch.

        Raises:
            Stopped: weights change no more.
        """
        with self._gate:
            if self._frozen:
                raise Stopped
            self._changed = True
            yield

    # The queue -----------------------------------------------------------------------------------

    async def _lease(self, purpose: Purpose = Purpose.TRAIN, task_ids: Sequence[str] = ()) -> Batch:
        """A whole batch.

        Raises:
            DeadlineError: none came together within `trainer.batch_seconds`.
        """
        trainer = self._config.trainer
        batch = await self._unless_stopped(
            self._queue.lease_batch(
                version=self._position.version,
                groups=len(task_ids) or self._config.queued_batch_groups,
                purpose=purpose,
                task_ids=task_ids,
                deadline_seconds=trainer.batch_seconds,
            )
        )
        if purpose is Purpose.TRAIN and self._config.staleness.over_budget is not OverBudget.KEEP:
            self._check_budget(batch)
        return batch

    def _check_budget(self, batch: Batch) -> None:
        oldest = self._position.version - batch.budget
        for trajectory in _trajectories(batch.groups):
            versions = trajectory.version_range()
            if versions is not None and versions[0] < oldest:
                raise LeewayError(
                    f"trajectory {trajectory.trajectory_id!r}: a token of version {versions[0]} "
                    f"came to the step at version {self._position.version}, over the budget of "
                    f"{batch.budget}; the queue should have masked or dropped it"
                )

    async def _feed(self) -> None:
        """Keeps tasks waiting in the queue, so that nodes never wait for the sampler."""
        while True:
            await self._fill()
            await asyncio.sleep(_FEED_SECONDS)

    async def _fill(self) -> None:
        """Lets more tasks wait than there are places, so that a commit's places are taken together:
        what an engine computes at once is then the same in every life of a run."""
        passed = 0
        while True:
            status = await self._queue.status()
            wanted = _WAITING_CAPACITIES * capacity(status.budget, status.batch_groups)
            outstanding = sum(status.groups[state] for state in ("running", "queued", "leased"))
            self._at_budget = outstanding >= capacity(status.budget, status.batch_groups)
            missing = wanted - status.groups["waiting"]
            # After a resume the sampler passes tasks that the queue knows.
            if missing <= 0 or passed > status.enqueued:
                return
            await self._queue.enqueue(self._sampler.take(missing))
            passed += missing

    async def _tune(self, seen: Observation) -> None:
        """With `staleness.budget: auto`: changes the budget if the step says that it should."""
        decision = self._tuner.decide(seen) if self._tuner is not None else None
        if decision is not None:
            log.info(
                "staleness budget", was=seen.budget, now=decision.budget, reason=decision.reason
            )
            await self._queue.set_budget(decision.budget, actor=f"auto ({decision.reason})")

    async def _evaluate(self, phase: str) -> bool:
        """Scores the held-out problems under the version in place, once a run and phase: whether it
        was now."""
        tasks = self._sampler.heldout(phase, min_version=self._position.version)
        if not tasks or phase in self._position.evaluated:
            return False
        await self._queue.enqueue(tasks)
        batch = await self._lease(Purpose.EVAL, [task.task_id for task in tasks])
        await self._queue.commit(batch, version=self._position.version)
        self._position.evaluated.append(phase)
        self._record.evaluation(self._position.version, phase, batch)
        return True

    # Weights and checkpoints ---------------------------------------------------------------------

    async def _resume(self) -> WeightPublisher:
        """One handshake, fresh or resumed: after it weights, sampler and queue agree."""
        checkpoint = self._checkpoints.latest()
        if checkpoint is not None:
            await self._compute(self._learners.load, checkpoint.path)
            self._position = Position(**checkpoint.extra)
            self._sampler.restore(self._position.sampler)
            self._saved_version = self._position.version
        resumed = await self._queue.resume(self._position.version)
        status = await self._queue.status()
        # Further than what is there to train on no life gets without the nodes.
        batches = status.groups["queued"] // status.batch_groups
        self._published_before = self._checkpoints.published
        self._replayed_to = min(self._published_before, self._position.version + batches)
        self._publisher = await asyncio.to_thread(self._start_publisher, resumed.incarnation)
        if self._position.version >= self._replayed_to:
            await self._publish()
        HEALTH.set_ready()
        log.info("ready", version=self._position.version, restored_groups=resumed.restored)
        return self._publisher

    async def _publish(self) -> None:
        """Hands the weights and their canary over to the broadcasting process."""
        version = self._position.version

        def hand_over() -> None:
            canary = self._canary.score(self._learners.policy)
            self._checkpoints.set_published(version)
            self._publisher.publish(version, self._learners.policy.weights(), canary)

        await self._compute(hand_over)

    async def _checkpoint(self) -> None:
        """Copies the state; it is written while training goes on, one generation at a time."""
        version = self._position.version
        if self._saved_version == version:
            return
        self._position.sampler = self._sampler.state()
        extra = asdict(self._position)
        with self._spans.span("checkpoint"):
            await self._written()
            write = await self._compute(self._learners.snapshot)
        self._saved_version = version
        self._writing = asyncio.create_task(self._write(version, write, extra))

    async def _write(
        self, version: int, write: Callable[[Path], None], extra: dict[str, Any]
    ) -> None:
        await asyncio.to_thread(self._checkpoints.save, version, write, extra)
        await self._queue.checkpointed(version)

    async def _written(self) -> None:
        """The last checkpoint is durable, or has failed."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def _checkpoint_at_stop(self) -> None:
        """Saves while the compute thread may be in the middle of a gradient that nobody needs."""
        log.info("stopping", version=self._position.version)
        await self._written()
        if self._saved_version != self._position.version:
            self._position.sampler = self._sampler.state()
            await asyncio.to_thread(
                self._checkpoints.save,
                self._position.version,
                self._learners.save,
                asdict(self._position),
                flush=False,
            )

    # Running -------------------------------------------------------------------------------------

    async def _compute(self, work: Callable[..., T], *args: Any) -> T:
        """Runs tensor work in its thread; the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _unless_stopped(self, wait: Awaitable[T]) -> T:
        """Raises `Stopped` when asked to end first; work in the compute thread goes on unheard."""
        waiting = asyncio.ensure_future(wait)
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if not waiting.done():
            waiting.cancel()
            raise Stopped
        return waiting.result()


def _trajectories(groups: Iterable[Group]) -> Iterable[Any]:
    return (trajectory for group in groups for trajectory in group.trajectories)
