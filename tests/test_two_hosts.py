"""A trainer on two hosts: two torchrun agents that meet over c10d, here on two loopback addresses.

What they share is the run's directory; one rank talks to the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from google.protobuf.message import Message

from leeway import config as configuration
from leeway import report, rpc
from leeway.local import free_addresses
from leeway.v1 import queue_pb2, queue_pb2_grpc
from tests import tiny
from tests.test_up import Run
from tests.waiting import children, gone, kill, until

SECONDS = 150.0
# An agent that is silent for so long is no longer counted: 3 x 2 s.
RENDEZVOUS = "keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=1"
# Otherwise an agent that stays never says again where ranks meet, and one that is new waits for it.
MEET_ANEW = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Hosts:
    """The processes of one run, each started by hand, as an operator would on each host."""

    def __init__(self, run: Run, steps: int, nodes: str) -> None:
        """
        Args:
            nodes: torchrun's: so many, or MIN:MAX.
        """
        self._run = run
        self._nodes = nodes
        queue, weights, self._meeting = free_addresses(3)
        settings = json.loads(run.config.read_text())
        settings["queue"]["address"] = queue
        settings["weights"] = {"address": weights}
        settings["security"] = {"token": "a-token"}
        settings["task"]["heldout"] = 0
        settings["trainer"]["steps"] = steps
        run.config.write_text(json.dumps(settings))
        run.path.mkdir(parents=True, exist_ok=True)
        self._started: list[subprocess.Popen[bytes]] = []
        self._log = run.directory / "output.txt"
        self._config = configuration.load(run.config, [], {})

    def leeway(self, *arguments: str) -> subprocess.Popen[bytes]:
        return self._start("-m", "leeway.cli", *arguments, str(self._run.config))

    def agent(self, address: str) -> subprocess.Popen[bytes]:
        """torchrun on the host of this address, with one rank."""
        return self._start(
            *("-m", "torch.distributed.run", "--nnodes", self._nodes, "--nproc-per-node", "1"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", self._meeting, "--rdzv-id", "two-hosts"),
            *("--rdzv-conf", RENDEZVOUS, "--local-addr", address, "--max-restarts", "3"),
            *("-m", "leeway.cli", "trainer", str(self._run.config)),
        )

    def meeting(self) -> bool:
        """Whether somebody listens where the agents meet."""
        host, _, port = self._meeting.partition(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    def status(self) -> queue_pb2.StatusResponse:
        answer = self._ask("Status", queue_pb2.StatusRequest())
        assert isinstance(answer, queue_pb2.StatusResponse)
        return answer

    def pause(self, paused: bool) -> None:
        """No new task is rolled out: training stands still once what there is has been used."""
        self._ask("Pause", queue_pb2.PauseRequest(paused=paused, actor="test"))

    def _ask(self, method: str, request: Message) -> Any:
        async def ask() -> Any:
            async with rpc.connect(self._config.queue.address, self._config.security) as channel:
                call = getattr(queue_pb2_grpc.TrajectoryQueueStub(channel), method)
                return await rpc.call(call, request, what=method, deadline_seconds=10.0)

        return asyncio.run(ask())

    def until(self, condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
        until(condition, what, seconds, self.said)

    def said(self) -> str:
        return self._log.read_text()[-20_000:]

    def stop(self) -> None:
        for process in self._started:
            kill(ranks(process))
            process.kill()
            process.wait()

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    **MEET_ANEW,
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(self._run.temporary),
                },
            )
        self._started.append(process)
        return process


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, tiny.build(tmp_path / "model"))


@contextlib.contextmanager
def started(run: Run, steps: int, nodes: str) -> Iterator[tuple[Hosts, subprocess.Popen[bytes]]]:
    """Queue, rollout and the agent at which the others meet."""
    here = Hosts(run, steps, nodes)
    try:
        here.leeway("queue", "serve")
        here.leeway("rollout")
        one = here.agent("127.0.0.1")
        here.until(here.meeting, "the first agent, at which the others meet")
        yield here, one
    finally:
        here.stop()


def ranks(
    agent: subprocess.Popen[bytes], where: Callable[[list[str]], bool] = lambda command: True
) -> list[psutil.Process]:
    """An agent's one rank, and what that has started; none once the agent has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return children(agent.pid, where)
    return []


def trainers(agent: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return ranks(agent, lambda command: "trainer" in command)


def wrote(run: Run) -> int:
    """How many ranks wrote the newest checkpoint; 0 before the first."""
    newest = run.path / "checkpoints" / "LATEST"
    if not newest.exists():
        return 0
    return len(list((newest.parent / newest.read_text()).glob("weights*.safetensors")))


def finished(here: Hosts, run: Run, steps: int) -> None:
    """The run is done, and nothing was lost or trained twice."""
    assert (run.path / "checkpoints" / "LATEST").read_text() == f"step-{steps:06d}"
    rows = report.read_rows(run.path)
    summary = report.summarize(rows, here.status(), cpu_seconds=1.0, wall_seconds=1.0)
    assert (summary["versions"], summary["lost"], summary["twice"]) == (steps, 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_agents_train_and_start_again_together_from_the_last_checkpoint(run: Run) -> None:
    steps = 14
    with started(run, steps, "2") as (here, one):
        other = here.agent("127.0.0.2")
        here.until(lambda: len(run.steps()) >= 3, "steps on two hosts")
        assert ranks(one) and ranks(other)

        # A rank dies: both agents start all anew.
        first = [*ranks(one), *ranks(other)]
        reached = len(run.steps())
        trainers(other)[0].send_signal(signal.SIGKILL)
        here.until(lambda: gone(first), "the end of all ranks of the first start")
        here.until(lambda: len(run.steps()) >= reached + 2, "steps after a rank's death")
        resumed = run.steps()[reached]["step"]
        assert 1 < resumed <= run.steps()[reached - 1]["step"] + 1

        # An agent dies: its ranks with it, the other host's wait for a new one.
        orphans, reached = ranks(other), len(run.steps())
        assert orphans
        other.send_signal(signal.SIGKILL)
        other.wait()
        here.until(lambda: gone(orphans), "the end of the ranks whose agent died", 10.0)
        another = here.agent("127.0.0.2")
        here.until(lambda: len(run.steps()) >= reached + 2, "steps with another agent")

        assert (one.wait(SECONDS), another.wait(SECONDS)) == (0, 0), here.said()
        finished(here, run, steps)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_goes_on_without_a_lost_host_and_takes_it_back(run: Run) -> None:
    steps = 24
    with started(run, steps, "1:2") as (here, one):
        other = here.agent("127.0.0.2")
        here.until(lambda: wrote(run) == 2, "a checkpoint of two hosts")

        # One is lost for good: the other goes on alone, from the checkpoint that both wrote.
        orphans, reached = ranks(other), len(run.steps())
        other.send_signal(signal.SIGKILL)
        other.wait()
        here.until(lambda: gone(orphans), "the end of the ranks whose agent died", 10.0)
        here.until(lambda: wrote(run) == 1, "a checkpoint of the host that stayed")
        resumed = run.steps()[reached]["step"]
        assert 1 < resumed <= run.steps()[reached - 1]["step"] + 1

        # It comes back: the one that trains starts anew, with both.
        here.pause(True)
        alone = ranks(one)
        another = here.agent("127.0.0.2")
        here.until(lambda: gone(alone), "the end of the rank that trained alone")
        here.until(lambda: bool(trainers(one) and trainers(another)), "ranks on both hosts")
        here.pause(False)
        assert len({row["step"] for row in run.steps()}) < steps - 2, "too early to see it"

        assert (one.wait(SECONDS), another.wait(SECONDS)) == (0, 0), here.said()
        assert wrote(run) == 2
        finished(here, run, steps)
