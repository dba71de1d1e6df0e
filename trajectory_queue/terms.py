"""What a run asks of tasks that others bring: how tokens are drawn, and how many trajectories."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from leeway.config import Config
from leeway.errors import DataError
from leeway.trajectory import Sampling, Task
from leeway.v1 import trajectory_pb2 as pb


@dataclass(frozen=True, slots=True)
class Terms:
    """Ratios and advantages mean something only if these are the run's own."""

    sampling: Sampling
    group_size: int

    @classmethod
    def of(cls, config: Config) -> Terms:
        return cls(
            Sampling(**config.sampling.model_dump(exclude={"group_size"})), config.queued_group_size
        )

    def applied(self, task: pb.Task) -> pb.Task:
        """The task with what it leaves out filled in.

        Raises:
            DataError: it asks for something else, or is no training task.
            WireError: it is no task at all.
        """
        result = pb.Task()
        result.CopyFrom(task)
        if not task.HasField("sampling"):
            result.sampling.CopyFrom(pb.Sampling(**asdict(self.sampling)))
        result.group_size = task.group_size or self.group_size
        result.purpose = task.purpose or pb.PURPOSE_TRAIN
        if result.purpose != pb.PURPOSE_TRAIN:
            raise DataError(f"task {task.task_id!r}: purpose = {task.purpose}: open training tasks")
        if result.group_size != self.group_size:
            raise DataError(
                f"task {task.task_id!r}: group_size = {task.group_size}: the run's groups have "
                f"{self.group_size}; leave it out, or set queue.group_release=streaming"
            )
        sampling = Task.from_wire(result).sampling
        if sampling != self.sampling:
            raise DataError(
                f"task {task.task_id!r}: sampling = {sampling}: the run's is "
                f"{self.sampling}; serve the traffic so, and leave it out"
            )
        return result
