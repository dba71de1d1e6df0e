"""The queue's door: nothing that is not a whole, honest trajectory gets past it.

`examine` parses the bytes once. Lengths, checksums, finite log-probabilities and the rest are
`Trajectory`'s own validation; here is what a trajectory must have besides to be trained on. What
depends on the run (task, versions, sampling) is checked by the ledger.
"""

from __future__ import annotations

import functools

from google.protobuf.message import DecodeError

from leeway.errors import WireError
from leeway.trajectory import FinishReason, Sampling, Trajectory
from leeway.v1 import trajectory_pb2 as pb
from trajectory_queue.commands import AtTheDoor, Entry, Refused


def examine(lease_id: str, payload: bytes) -> Entry | AtTheDoor:
    """What the ledger needs to know of a finished trajectory, or why it is refused."""
    message = pb.Trajectory()
    try:
        message.ParseFromString(payload)
        trajectory = Trajectory.from_wire(message)
    except (DecodeError, WireError) as error:
        return AtTheDoor(lease_id, _refused(message.trajectory_id, str(error)))
    fault = _fault(trajectory)
    if fault is not None:
        return AtTheDoor(lease_id, fault)
    versions = trajectory.version_range()
    oldest, newest = versions if versions is not None else (None, None)
    reward = trajectory.reward
    assert reward is not None
    return Entry(
        lease_id=lease_id,
        task_id=trajectory.task_id,
        trajectory_id=trajectory.trajectory_id,
        index=trajectory.index,
        sampling=sampling_text(trajectory.sampling),
        oldest=oldest,
        newest=newest,
        tokens=trajectory.response_length,
        largest_id=int(trajectory.token_ids.max()),
        score=trajectory.score if trajectory.score is not None else reward,
        payload=payload,
    )


@functools.lru_cache
def sampling_text(sampling: Sampling) -> str:
    """How tokens are drawn, to the letter: trajectories must agree with their task."""
    return (
        f"temperature {sampling.temperature!r}, top_p {sampling.top_p!r}, "
        f"top_k {sampling.top_k}, max_new_tokens {sampling.max_new_tokens}"
    )


def _fault(trajectory: Trajectory) -> Refused | None:
    def refused(field: str, given: object, expected: str) -> Refused:
        return Refused(trajectory.trajectory_id, field, str(given), expected)

    if trajectory.finish_reason is FinishReason.UNFINISHED:
        return refused("finish_reason", "unfinished", "give partial generations back with Return")
    if trajectory.reward is None:
        return refused("reward", "missing", "score the trajectory before pushing it")
    if trajectory.versions and min(span.version for span in trajectory.versions) < 0:
        return refused("versions", list(trajectory.versions), "versions count from 0")
    return None


def _refused(trajectory_id: str, message: str) -> Refused:
    """Takes "trajectory 'x': field = value: remedy" apart."""
    fault = message.removeprefix(f"trajectory {trajectory_id!r}: ")
    name, found, rest = fault.partition(" = ")
    if found:
        given, _, expected = rest.partition(": ")
        return Refused(trajectory_id, name, given, expected)
    name, found, rest = fault.partition(": ")
    return Refused(trajectory_id, name if found else "trajectory", "malformed", rest or fault)
