"""A rollout fleet and a trainer without a model, for trying the queue at any scale on one machine.

Samples take the time that a `Pace` says and hold tokens that follow from the task's seed, so that a
trainer can tell whether what it gets is what was made. Everything else is real: the nodes lease,
extend, push, give back and fail through the same client as a real node, take new weights in the
middle of a sample, and the trainer resumes, leases, commits and checkpoints like a real one and
writes metrics.jsonl, with what concerns the queue.

    python -m trajectory_queue.simulated fleet CONFIG [--nodes 100] [--name a]
    python -m trajectory_queue.simulated trainer CONFIG [--tasks 1000] [--step-seconds 0.5]
"""

from trajectory_queue.simulated.fleet import run_fleet
from trajectory_queue.simulated.pace import Pace, Planned, Speed, make_task
from trajectory_queue.simulated.trainer import Learned, run_trainer

__all__ = ["Learned", "Pace", "Planned", "Speed", "make_task", "run_fleet", "run_trainer"]
