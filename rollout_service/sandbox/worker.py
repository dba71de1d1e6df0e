"""The process that holds a user's code. Light imports only; run as a script by `pool`.

Protocol, one JSON object a line: first the worker says {"ready": true} or {"fault": why it cannot
start}; then each request gets one answer, or {"fault": what the code did wrong}. What requests and
answers hold is the host's matter. Before its answer the code may ask judges: a line with {"judge":
name} goes to the node, and one comes back.

What must hold: nothing but answers reaches the pipe. The code's own standard output goes to
standard error, its standard input is empty. The process ends with its parent: when its requests
end, and on Linux also when the parent dies during a call.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any, Protocol

from leeway.orphans import end_with_parent
from rollout_service.sandbox.judge import Judge, Line
from rollout_service.sandbox.loading import FaultError, answer_line, fault_line


class Host(Protocol):
    """Holds one thing that the user wrote."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]: ...


def open_host(kind: str, spec: str, judges: dict[str, Judge]) -> Host:
    """Raises `FaultError` when what the user wrote cannot be used."""
    if kind == "environment":
        from rollout_service.sandbox.environment import EnvironmentHost

        return EnvironmentHost(spec, judges)
    from rollout_service.sandbox.reward import RewardHost

    return RewardHost(spec, judges)


def pipes() -> tuple[Any, Any]:
    """Requests and answers; from now on nothing else reaches them."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.path.insert(0, str(Path.cwd()))
    return requests, answers


def limit_memory(memory_bytes: int) -> None:
    """Of data and heap: beyond, Python raises MemoryError."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def main(kind: str, spec: str, parent: int, memory_bytes: int, judges: list[str]) -> None:
    end_with_parent(parent)
    limit_memory(memory_bytes)
    requests, answers = pipes()

    def write(line: bytes) -> None:
        answers.write(line)
        answers.flush()

    line_to_node = Line(write, requests.readline)
    try:
        host = open_host(kind, spec, {name: Judge(name, line_to_node) for name in judges})
    except FaultError as fault:
        write(fault_line(fault))
        return
    write(answer_line({"ready": True}))
    for line in requests:
        line_to_node.open()
        try:
            answer = answer_line(host.answer(json.loads(line)))
        except FaultError as fault:
            answer = fault_line(fault)
        line_to_node.close()
        write(answer)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))
