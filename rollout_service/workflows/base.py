"""What the node asks of a workflow: samples in, scored trajectories out.

`single_turn` answers a prompt and asks a reward function; `agents` gives each sample a session of
the gateway and lets a program act in it. A failure belongs to one sample and is typed; what breaks
the engine is raised, and ends the node.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from leeway.errors import LeewayError
from leeway.trajectory import Task, Trajectory
from trajectory_queue.client import FailureKind


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One rollout to be made.

    Attributes:
        sample_id: Unique on the node.
        index: Which of its group it is.
        partial: What a drained node had of it.
    """

    sample_id: str
    task: Task
    index: int
    partial: Trajectory | None = None

    @property
    def seed(self) -> int:
        return sample_seed(self.task, self.index)


def sample_seed(task: Task, index: int) -> int:
    """The seed of one sample: a function of the task's seed and the sample's index."""
    return xxhash.xxh3_64_intdigest(f"{task.seed}/{index}".encode())


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """Nothing more is generated for the sample: another may take its place."""

    sample: Sample


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """The trajectory is whole and scored."""

    sample: Sample
    trajectory: Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Interrupted:
    """It was aborted; `partial` is what another node may continue, if anything."""

    sample: Sample
    partial: Trajectory | None


@dataclass(frozen=True, slots=True, eq=False)
class Failed:
    """It ended with a typed reason, and without a reward."""

    sample: Sample
    kind: FailureKind
    reason: str


Event = Generated | Finished | Interrupted | Failed


def failed(sample: Sample, error: LeewayError) -> Failed:
    return Failed(sample, FailureKind.of(error), str(error))


class Workflow(Protocol):
    """Turns samples into trajectories."""

    async def run(
        self, samples: Sequence[Sample], tell: Callable[[Event], Awaitable[None]]
    ) -> None:
        """Begins all samples at once; returns when all have ended.

        Each is told once as `Generated`, and then once as what became of it.

        Raises:
            LeewayError: the engine is broken.
        """
        ...

    async def abort(self, sample_ids: Collection[str]) -> None:
        """Ends the samples soon; those that were not finished are told as `Interrupted`."""
        ...

    def progress(self, sample_ids: Collection[str]) -> int:
        """Tokens generated so far for samples that have not ended."""
        ...
