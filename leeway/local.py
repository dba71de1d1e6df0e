"""Both clusters on one machine, as child processes that talk only over the network: `leeway up`.

The supervisor owns the children. One that dies is started again a few times, unless its exit code
says that this cannot help; then the run ends with the reason. Children live in sessions of their
own, so that Ctrl-C reaches the supervisor alone, and hold the other end of a pipe: when the
supervisor is gone, however that happened, they stop.

While they run, `live.yaml` in the run's directory, which only its owner can read, is the
configuration by which an operator's command reaches them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from leeway.config import Config, SecurityConfig
from leeway.errors import InfrastructureError
from leeway.files import write_private
from leeway.process import EXIT_CONFIG, EXIT_OK, LIFELINE

MAX_RESTARTS = 3
# Together under the five seconds that Ctrl-C may take.
CLIENT_SECONDS = 3.4
QUEUE_SECONDS = 0.5
KILL_SECONDS = 0.3
LAST_WORDS_SECONDS = 0.1
# Kept of every child's log, to say why it died.
_LAST_LINES = 15


@dataclass(slots=True)
class Child:
    """One supervised process; `name` is also the name of its log file."""

    name: str
    command: Sequence[str]
    restarts: int = 0
    process: asyncio.subprocess.Process | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))


class Supervisor:
    """Starts, watches, restarts and stops the processes of one run, as a context."""

    def __init__(self, config: Config, config_path: Path, redis_url: str) -> None:
        self._config = config
        self._environment = _environment(config, redis_url)
        self._live = config.run.path / "live.yaml"
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._stopping = False
        base = [sys.executable, "-m", "leeway.cli"]
        path = str(config_path)
        self._children = [
            Child("queue", [*base, "queue", "serve", path]),
            Child("trainer", [*_launcher(config.trainer.ranks), "trainer", path]),
            *(
                Child(f"rollout-{index}", [*base, "rollout", path, "--node-id", f"node-{index}"])
                for index in range(config.rollout.nodes)
            ),
        ]

    @property
    def queue_address(self) -> str:
        return self._environment["LEEWAY__QUEUE__ADDRESS"]

    @property
    def page_address(self) -> str:
        return self._environment["LEEWAY__QUEUE__PAGE_ADDRESS"]

    @property
    def security(self) -> SecurityConfig:
        """What a client of the children needs."""
        return self._config.security.model_copy(
            update={"token": SecretStr(self._environment["LEEWAY__SECURITY__TOKEN"])}
        )

    async def __aenter__(self) -> Supervisor:
        self._describe()
        self._watchers = {
            child.name: asyncio.create_task(self._keep_alive(child)) for child in self._children
        }
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        self._live.unlink(missing_ok=True)
        await self._stop_all()
        # Then they have read the children's last words.
        await asyncio.wait(self._watchers.values(), timeout=LAST_WORDS_SECONDS)
        for task in self._watchers.values():
            task.cancel()

    def _describe(self) -> None:
        """Writes `live.yaml`."""
        config = self._config.model_copy(
            update={
                "queue": self._config.queue.model_copy(
                    update={
                        "address": self.queue_address,
                        "page_address": self.page_address,
                        "redis_url": None,
                    }
                ),
                "weights": self._config.weights.model_copy(
                    update={"address": self._environment["LEEWAY__WEIGHTS__ADDRESS"]}
                ),
                "security": self.security,
            }
        )
        token = self._environment["LEEWAY__SECURITY__TOKEN"]
        write_private(self._live, config.to_yaml(secret=token))

    async def run(self, stop: asyncio.Event) -> None:
        """Waits until the trainer has finished, or `stop` is set.

        Raises:
            InfrastructureError: a child died for good; the message has its last words.
        """
        stopping = asyncio.create_task(stop.wait())
        watched = set(self._watchers.values())
        try:
            while not stopping.done() and not self._watchers["trainer"].done():
                done, _ = await asyncio.wait(
                    {*watched, stopping}, return_when=asyncio.FIRST_COMPLETED
                )
                watched -= done
                for task in done - {stopping}:
                    task.result()
        finally:
            stopping.cancel()

    async def _keep_alive(self, child: Child) -> None:
        """Runs the child until it ends well; restarts it when that may help."""
        while True:
            code = await self._run_once(child)
            if code == EXIT_OK or self._stopping:
                return
            if code == EXIT_CONFIG or child.restarts == MAX_RESTARTS:
                raise InfrastructureError(
                    f"{child.name} ended with exit code {code}"
                    + (f" after {child.restarts} restarts" if child.restarts else "")
                    + ":\n"
                    + "\n".join(child.last_lines)
                )
            child.restarts += 1
            print(f"{child.name} ended with exit code {code}; starting it again", file=sys.stderr)

    async def _run_once(self, child: Child) -> int:
        child.process = await asyncio.create_subprocess_exec(
            *child.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
        )
        assert child.process.stdout is not None
        with (self._config.run.path / "logs" / f"{child.name}.log").open("ab") as file:
            async for line in child.process.stdout:
                file.write(line)
                file.flush()
                child.last_lines.append(line.decode(errors="replace").rstrip())
        return await child.process.wait()

    async def _stop_all(self) -> None:
        """The queue last: the trainer commits what it has learned, nodes give back what they have
        begun."""
        running = {
            child.name: child.process for child in self._children if child.process is not None
        }
        queue = [running.pop("queue")] if "queue" in running else []
        for processes, seconds in (
            (list(running.values()), CLIENT_SECONDS),
            (queue, QUEUE_SECONDS),
        ):
            for process in processes:
                _signal_group(process, signal.SIGTERM)
            waits = [asyncio.ensure_future(process.wait()) for process in processes]
            if not waits:
                continue
            _, late = await asyncio.wait(waits, timeout=seconds)
            for process in processes:
                _signal_group(process, signal.SIGKILL)
            if late:
                await asyncio.wait(late, timeout=KILL_SECONDS)


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signals the child alone to stop, but kills it with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        if number is signal.SIGKILL:
            os.killpg(process.pid, number)
        elif process.returncode is None:
            process.send_signal(number)


def _launcher(ranks: int) -> list[str]:
    """What runs the command on so many ranks of this machine."""
    if ranks == 1:
        return [sys.executable, "-m", "leeway.cli"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(ranks), "-m", "leeway.cli"]


def _environment(config: Config, redis_url: str) -> dict[str, str]:
    queue, weights, page = free_addresses(3)
    processes = 1 + config.rollout.nodes
    threads = max(1, len(os.sched_getaffinity(0)) // processes) if _LINUX else 1
    token = config.security.token
    defaults: Mapping[str, str] = {
        # A thread that spins while it waits for the others starves them on a shared core.
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {
        **defaults,
        **os.environ,
        LIFELINE: "1",
        "PYTHONUNBUFFERED": "1",
        "LEEWAY__QUEUE__ADDRESS": queue,
        "LEEWAY__QUEUE__PAGE_ADDRESS": config.queue.page_address or page,
        "LEEWAY__QUEUE__REDIS_URL": redis_url,
        "LEEWAY__WEIGHTS__ADDRESS": weights,
        "LEEWAY__SECURITY__TOKEN": (
            token.get_secret_value() if token is not None else secrets.token_urlsafe(24)
        ),
    }


_LINUX = hasattr(os, "sched_getaffinity")


def free_addresses(count: int) -> list[str]:
    """Loopback addresses with distinct ports that were free a moment ago."""
    with contextlib.ExitStack() as held:
        return [f"127.0.0.1:{port}" for port in _free_ports(held, count)]


def _free_ports(held: contextlib.ExitStack, count: int) -> Iterator[int]:
    for _ in range(count):
        listener = held.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        yield listener.getsockname()[1]
