"""`leeway deploy check` finds what is wrong with a deployment, and nothing when it is well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from leeway import rpc
from leeway.config import (
    Config,
    QueueConfig,
    RolloutConfig,
    RunConfig,
    SandboxConfig,
    SecurityConfig,
    TaskConfig,
    WeightsConfig,
)
from leeway.config import ModelConfig as Model
from leeway.deploy import check as checking
from leeway.deploy.credentials import Parts, make
from leeway.v1 import weights_pb2_grpc
from tests import sandboxes
from trajectory_queue.main import serve

NAME = "leeway-trainer-cluster"


def write(directory: Path, now: datetime) -> None:
    for name, data in make(Parts("leeway", (NAME,)), {}, now).items():
        (directory / name).mkdir(parents=True)
        for key, value in data.items():
            (directory / name / key).write_bytes(value)


def proof(directory: Path, component: str) -> SecurityConfig:
    of = directory / f"leeway-{component}-tls"
    return SecurityConfig(
        certificate=of / "tls.crt",
        key=of / "tls.key",
        authority=of / "ca.crt",
        server_name=NAME,
    )


def configuration(tmp_path: Path, security: SecurityConfig, **addresses: str) -> Config:
    return Config(
        run=RunConfig(directory=tmp_path / "runs"),
        model=Model(path="none"),
        task=TaskConfig(jsonl=Path("none"), reward="a:b"),
        queue=QueueConfig(address=addresses.get("queue", "127.0.0.1:0")),
        weights=WeightsConfig(address=addresses.get("weights", "127.0.0.1:0")),
        rollout=RolloutConfig(sandbox=SandboxConfig(address=addresses.get("sandbox"))),
        security=security,
    )


@asynccontextmanager
async def deployment(tmp_path: Path, secrets: Path) -> AsyncIterator[dict[str, str]]:
    """A real queue, and something that serves where the weights would be."""
    stop, ready = asyncio.Event(), asyncio.Event()
    addresses: dict[str, str] = {}

    def on_ready(address: str) -> None:
        addresses["queue"] = address
        ready.set()

    async def no_service(server: rpc.Server) -> None:
        service = weights_pb2_grpc.WeightBroadcastServicer()
        add: Any = weights_pb2_grpc.add_WeightBroadcastServicer_to_server
        await server.add(add, service, "leeway.v1.WeightBroadcast")

    config = configuration(tmp_path, proof(secrets, "queue"))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(config, stop=stop, on_ready=on_ready))
        sandbox = sandboxes.configuration(reward="tests/rewards/functions.py:good")
        secured = sandbox.model_copy(update={"security": proof(secrets, "sandbox")})
        async with (
            rpc.serve("127.0.0.1:0", proof(secrets, "trainer"), no_service) as weights,
            sandboxes.serving(secured) as at,
        ):
            async with asyncio.timeout(60):
                await ready.wait()
            yield {**addresses, "weights": weights.address, "sandbox": at}
        stop.set()


async def findings(config: Config, **options: Any) -> dict[str, checking.Finding]:
    return {found.what: found async for found in checking.check(config, **options)}


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    write(tmp_path / "secrets", datetime.now(UTC))
    return tmp_path / "secrets"


async def test_a_good_deployment_is_found_good(tmp_path: Path, secrets: Path) -> None:
    async with deployment(tmp_path, secrets) as addresses:
        config = configuration(tmp_path, proof(secrets, "operator"), **addresses)
        found = await findings(config)
    assert all(finding.good for finding in found.values()), found
    text = " ".join(found)
    assert found["sandbox serves"].good
    for word in ("secured", "certificate", "reachable", "serves", "release", "time", "Redis"):
        assert word in text


async def test_what_is_wrong_is_named(tmp_path: Path, secrets: Path) -> None:
    write(tmp_path / "stranger", datetime.now(UTC))
    async with deployment(tmp_path, secrets) as addresses:
        stranger = configuration(tmp_path, proof(tmp_path / "stranger", "operator"), **addresses)
        found = await findings(stranger)
        assert not found["queue serves"].good

        nobody = configuration(tmp_path, proof(secrets, "queue"), **addresses)
        found = await findings(nobody)
        assert found["queue serves"].good
        assert "permission_denied" in found["the queue lets this caller in"].detail

        closed = {**addresses, "weights": "127.0.0.1:1", "sandbox": "127.0.0.1:1"}
        config = configuration(tmp_path, proof(secrets, "operator"), **closed)
        found = await findings(config, gpus=99)
        assert not found["weights 127.0.0.1:1 is reachable"].good
        assert not found["sandbox 127.0.0.1:1 is reachable"].good
        assert found["the queue lets this caller in"].good
        assert not found["GPUs are visible"].good


async def test_a_certificate_that_ends_soon_is_found(tmp_path: Path) -> None:
    old = datetime.now(UTC) - timedelta(days=360)
    write(tmp_path / "old", old)
    config = configuration(tmp_path, proof(tmp_path / "old", "operator"), queue="127.0.0.1:1")
    found = await findings(config)
    assert not found["security.certificate is valid"].good
    assert found["security.authority is valid"].good


@pytest.mark.parametrize(
    ("theirs", "good"),
    [("0.1.0", True), ("0.2.3", True), ("0.3.0", False), ("1.1.0", False), ("unknown", False)],
)
def test_releases_may_differ_by_one(theirs: str, good: bool) -> None:
    assert checking._versions("queue", theirs, "0.1.0").good is good


@pytest.mark.parametrize(("seconds", "good"), [(0.5, True), (-14, True), (20, False)])
def test_clocks_that_would_refuse_tokens_are_found(seconds: float, good: bool) -> None:
    assert checking._clock("queue", 1000.0 + seconds, 1000.0).good is good
