"""A sandbox apart from its nodes: what its death, its absence and strangers come to.

What it shares with a node's own workers is in `test_pool`, `test_judges` and `tests/agents`, which
run in both places. Here sandboxes are processes of `leeway sandbox`.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from leeway.config import Config, SecurityConfig
from leeway.deploy.credentials import Parts, make
from leeway.errors import ConfigError, DataError, DeadlineError, InfrastructureError, WireError
from leeway.local import free_addresses
from rollout_service.rewards.judges import Judges
from rollout_service.sandbox import remote
from rollout_service.sandbox.remote import LOST, Sandboxes, sandboxes
from rollout_service.sandbox.work import Work
from tests.rewards.test_pool import spec
from tests.sandboxes import configuration, ended, serving, under_way
from tests.waiting import eventually

WRITTEN = Path(__file__).parents[1] / "agents" / "written.py"


class Fleet:
    """Sandboxes that run one task, each a process."""

    def __init__(self, directory: Path, count: int, task: dict[str, Any]) -> None:
        self.addresses = free_addresses(count)
        self.config = configuration(address=f"ipv4:{','.join(self.addresses)}", **task)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._file = directory / "run.yaml"
        self._file.write_text(self.config.to_yaml())
        self._log = directory / "sandboxes.log"
        for number in range(count):
            self.processes.append(self.start(number))

    def start(self, number: int) -> subprocess.Popen[bytes]:
        address = f"rollout.sandbox.address={self.addresses[number]}"
        command = [sys.executable, "-m", "leeway.cli", "sandbox", str(self._file), address]
        with self._log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def all_serve(self) -> bool:
        return self.said().count("sandbox is serving") == len(self.addresses)

    def owner(self, worker: int) -> subprocess.Popen[bytes]:
        """The sandbox whose child a worker is."""
        parent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        return next(each for each in self.processes if each.pid == parent)

    def said(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts sandboxes, and opens a node's `Workers` there."""
    started: list[Fleet] = []

    @asynccontextmanager
    async def opening(count: int, **task: Any) -> AsyncIterator[tuple[Fleet, Sandboxes]]:
        made = Fleet(tmp_path, count, task)
        started.append(made)
        await eventually(made.all_serve, f"{count} sandboxes", 60)
        async with sandboxes_of(made.config) as workers:
            yield made, workers

    yield opening
    for each in started:
        each.close()


@asynccontextmanager
async def sandboxes_of(
    config: Config, address: str | None = None, work: Work | None = None
) -> AsyncIterator[Sandboxes]:
    where = address or config.rollout.sandbox.address
    assert where is not None
    given = work or Work.of(config.task)
    async with Judges({}) as judges, sandboxes(config, where, given, judges) as workers:
        yield workers


def scoring(completion: str) -> dict[str, Any]:
    return {"completion": completion, "columns": {}}


# Sandboxes that die ------------------------------------------------------------------------------


async def test_a_call_whose_sandbox_is_killed_is_made_again_at_another(
    fleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    lost = LOST._value.get()
    async with fleet(2, reward=spec("hangs_once")) as (made, workers):
        call = asyncio.create_task(workers.call(scoring("x")))
        worker = await under_way(tmp_path / "once")
        made.owner(worker).send_signal(signal.SIGKILL)
        async with asyncio.timeout(30):
            assert await call == {"value": 1.0}
        assert LOST._value.get() > lost
        # Its workers are gone with it.
        await ended(worker)


async def test_an_episode_whose_sandbox_is_killed_is_infrastructure(fleet: Any) -> None:
    async with fleet(2, environment=f"{WRITTEN}:Adder") as (made, workers):
        with pytest.raises(InfrastructureError):
            async with workers.take() as ask:
                assert (await ask({"reset": {}}))["stepwise"] is False
                made.processes[0].kill()
                made.processes[1].kill()
                await ask({"call": "add", "arguments": {"a": 1, "b": 2}})
        for number, process in enumerate(made.processes):
            process.wait()
            made.processes[number] = made.start(number)
        # Who comes then waits until one is back.
        async with workers.take() as ask:
            await ask({"reset": {}})
            assert await ask({"call": "add", "arguments": {"a": 1, "b": 2}}) == {"result": "3"}


async def test_a_call_that_kills_its_sandboxes_does_not_kill_them_all(fleet: Any) -> None:
    async with fleet(4, reward=spec("kills_its_parent")) as (made, workers):
        with pytest.raises(InfrastructureError):
            await workers.call(scoring("kill"))
        assert await workers.call(scoring("live")) == {"value": 1.0}
        alive = [process for process in made.processes if process.poll() is None]
        assert len(alive) == 1


async def test_sandboxes_that_stay_away_are_infrastructure(
    fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_AWAY_SECONDS", 1.0)
    async with fleet(1, reward=spec("good")) as (made, workers):
        made.processes[0].kill()
        with pytest.raises(DeadlineError, match=r"rollout.sandbox.address = .* no sandbox for"):
            await workers.call(scoring("x"))


async def test_one_that_is_told_to_end_answers_what_is_under_way(
    fleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELD", str(tmp_path / "held"))
    lost = LOST._value.get()
    async with fleet(2, reward=spec("held"), reward_seconds=60) as (made, workers):
        call = asyncio.create_task(workers.call(scoring("hold")))
        leaving = made.owner(await under_way(tmp_path / "held"))
        leaving.send_signal(signal.SIGTERM)
        await eventually(lambda: "draining" in made.said(), "its draining")
        # What comes meanwhile goes to the other.
        assert await workers.call(scoring("x")) == {"value": 1.0}
        (tmp_path / "held").unlink()
        assert await call == {"value": 1.0}
        assert LOST._value.get() == lost
        assert await asyncio.to_thread(leaving.wait, 20) == 0


async def test_connections_that_are_made_anew_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nodes find sandboxes that came later."""
    monkeypatch.setattr("rollout_service.sandbox.service._CONNECTION_SECONDS", 0.3)
    lost = LOST._value.get()
    config = configuration(reward=spec("length"), reward_processes=2)
    async with serving(config) as address, sandboxes_of(config, address) as workers:
        clock = asyncio.get_running_loop().time
        end = clock() + 3.0
        while clock() < end:
            scores = await asyncio.gather(*(workers.call(scoring("x" * n)) for n in range(4)))
            assert [score["value"] for score in scores] == [0.0, 1.0, 2.0, 3.0]
    assert LOST._value.get() == lost


# What cannot be -----------------------------------------------------------------------------------


async def test_one_that_runs_something_else_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As during an upgrade: an old sandbox must not score for a new run."""
    monkeypatch.setattr(remote, "_AWAY_SECONDS", 0.5)
    config = configuration(reward=spec("good"))
    async with serving(config) as address:
        other = Work("reward", spec("length"), 1, 10.0)
        with pytest.raises(DeadlineError, match="this sandbox runs"):
            async with sandboxes_of(config, address, other):
                pass


async def test_what_is_too_large_is_the_datas_fault() -> None:
    config = configuration(reward=spec("length"))
    async with serving(config) as address, sandboxes_of(config, address) as workers:
        large = "x" * (remote.MESSAGE_BYTES + 1)
        with pytest.raises(DataError, match="keep the row's columns smaller"):
            await workers.call(scoring(large))
        assert await workers.call(scoring("abc")) == {"value": 3.0}


async def test_a_worker_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_service.sandbox.service.WIRE_SECONDS", 0.5)
    task = {"environment": f"{WRITTEN}:Adder", "session_seconds": 1.0}
    config = configuration(**task)
    async with serving(config) as address, sandboxes_of(config, address) as workers:
        with pytest.raises(InfrastructureError, match=r"was kept for more than 1.5 s"):
            async with workers.take() as ask:
                await ask({"reset": {}})
                await asyncio.sleep(2.0)
                await ask({"score": ""})


def test_agents_have_no_sandbox() -> None:
    with pytest.raises(ValueError, match=r"task.agent runs on the node"):
        configuration(agent="external")


async def test_a_sandbox_needs_an_address_and_code_that_loads() -> None:
    with pytest.raises(ExceptionGroup) as nowhere:
        async with serving(configuration(address=None, reward=spec("good"))):  # type: ignore[arg-type]
            pass
    assert "rollout.sandbox.address is not set" in str(nowhere.value.exceptions[0])
    with pytest.raises(ExceptionGroup) as broken:
        async with serving(configuration(reward=spec("not_a_function"))):
            pass
    assert isinstance(broken.value.exceptions[0], ConfigError)


# Who may ask --------------------------------------------------------------------------------------


class Secrets:
    """A deployment's Secrets, as files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for name, data in make(Parts("leeway", ("leeway",)), {}, datetime.now(UTC)).items():
            (directory / name).mkdir(parents=True)
            for key, value in data.items():
                (directory / name / key).write_bytes(value)

    def certificate(self, component: str, **more: Any) -> SecurityConfig:
        of = self._directory / f"leeway-{component}-tls"
        files = {"certificate": of / "tls.crt", "key": of / "tls.key", "authority": of / "ca.crt"}
        return SecurityConfig(**files, **more)

    def token(self, role: str, *, directory: str = "leeway-tokens") -> Path:
        return self._directory / directory / role

    def with_key_of(self, role: str) -> SecurityConfig:
        return SecurityConfig(
            token_file=self.token(role), authority=self._directory / "leeway-sandbox-tls/ca.crt"
        )


async def refusal(config: Config, address: str, security: SecurityConfig) -> str:
    """How a call ends: "ok", or why it was refused."""
    caller = config.model_copy(update={"security": security})
    try:
        async with sandboxes_of(caller, address) as workers:
            assert await workers.call(scoring("abc")) == {"value": 3.0}
    except WireError as error:
        return str(error)
    return "ok"


async def test_nodes_get_in_by_their_certificate_and_nobody_else_does(tmp_path: Path) -> None:
    secrets = Secrets(tmp_path)
    plain = configuration(reward=spec("length"))
    config = plain.model_copy(update={"security": secrets.certificate("sandbox")})
    async with serving(config) as address:
        assert await refusal(config, address, secrets.certificate("rollout")) == "ok"
        # Its own gives no role, there as everywhere.
        for component in ("trainer", "operator", "producer", "queue", "sandbox"):
            why = await refusal(config, address, secrets.certificate(component))
            assert "permission_denied" in why, component


async def test_nodes_get_in_by_a_key_that_leases_nothing(tmp_path: Path) -> None:
    secrets = Secrets(tmp_path)
    keys = tmp_path / "accepted"
    keys.mkdir()
    (keys / "sandbox-client").write_bytes(secrets.token("sandbox-client").read_bytes())
    server = secrets.certificate("sandbox", accepted_tokens=keys)
    config = configuration(reward=spec("length")).model_copy(update={"security": server})
    async with serving(config) as address:
        assert await refusal(config, address, secrets.with_key_of("sandbox-client")) == "ok"
        for role in ("rollout", "trainer", "operator"):
            assert "unauthenticated" in await refusal(config, address, secrets.with_key_of(role))
