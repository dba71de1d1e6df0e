"""A client without the right certificate, token, role or size is refused and logged."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from leeway import rpc
from leeway.config import SecurityConfig
from leeway.deploy.credentials import CERTIFICATE_DAYS, Parts, make
from leeway.errors import WireError
from leeway.roles import Role, may_call
from leeway.v1 import queue_pb2 as pb
from leeway.v1 import queue_pb2_grpc, weights_pb2

SERVER_NAME = "leeway-trainer-cluster"
LIMIT = 1 << 16


class Service(queue_pb2_grpc.TrajectoryQueueServicer):
    async def Status(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.StatusResponse(run_id="run")

    async def Extend(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ExtendResponse()

    async def SetBudget(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.SetBudgetResponse()

    async def LeaseBatch(self, request: Any, context: Any) -> Any:  # noqa: N802
        yield pb.LeaseBatchResponse(batch_id="batch")


class Secrets:
    """A deployment's Secrets, as files."""

    def __init__(self, directory: Path, now: datetime | None = None) -> None:
        self.directory = directory
        made = make(Parts("leeway", (SERVER_NAME,)), {}, now or datetime.now(UTC))
        for name, data in made.items():
            (directory / name).mkdir(parents=True)
            for key, value in data.items():
                (directory / name / key).write_bytes(value)

    def certificate(self, component: str, **more: Any) -> SecurityConfig:
        of = self.directory / f"leeway-{component}-tls"
        return SecurityConfig(
            certificate=of / "tls.crt",
            key=of / "tls.key",
            authority=of / "ca.crt",
            server_name=SERVER_NAME,
            **more,
        )

    @property
    def tokens(self) -> Path:
        return self.directory / "leeway-tokens"

    def token(self, role: str) -> SecurityConfig:
        return SecurityConfig(
            token_file=self.tokens / role,
            authority=self.directory / "leeway-queue-tls" / "ca.crt",
            server_name=SERVER_NAME,
        )


@pytest.fixture
def secrets(tmp_path: Path) -> Secrets:
    return Secrets(tmp_path / "secrets")


@asynccontextmanager
async def serving(security: SecurityConfig) -> AsyncIterator[str]:
    async def setup(server: rpc.Server) -> None:
        name = pb.DESCRIPTOR.services_by_name["TrajectoryQueue"].full_name
        await server.add(queue_pb2_grpc.add_TrajectoryQueueServicer_to_server, Service(), name)

    async with rpc.serve("127.0.0.1:0", security, setup, max_message_bytes=LIMIT) as server:
        yield server.address


async def code_of(address: str, client: SecurityConfig, method: str, request: Any) -> str:
    """How a call ends: "ok", or its status."""
    async with rpc.connect(address, client) as channel:
        answer = getattr(queue_pb2_grpc.TrajectoryQueueStub(channel), method)(request, timeout=10)
        try:
            if method == "LeaseBatch":
                assert [message.batch_id async for message in answer] == ["batch"]
            else:
                await answer
        except grpc.aio.AioRpcError as error:
            return error.code().name.lower()
    return "ok"


CALLS = {
    "Status": pb.StatusRequest(),
    "Extend": pb.ExtendRequest(),
    "SetBudget": pb.SetBudgetRequest(),
    "LeaseBatch": pb.LeaseBatchRequest(),
}


@pytest.mark.parametrize("proof", ["certificate", "token"])
async def test_each_role_may_call_what_is_its_own(secrets: Secrets, proof: str) -> None:
    tokens = {"accepted_tokens": secrets.tokens} if proof == "token" else {}
    async with serving(secrets.certificate("queue", **tokens)) as address:
        # Nodes meet their sandboxes by their own certificate; only tokens need a role for it.
        roles = set(Role) - ({Role.SANDBOX_CLIENT} if proof == "certificate" else set())
        for role in sorted(roles):
            client = getattr(secrets, proof)(role.value)
            for method, request in CALLS.items():
                allowed = role in may_call(f"/leeway.v1.TrajectoryQueue/{method}")
                expected = "ok" if allowed else "permission_denied"
                with structlog.testing.capture_logs() as logs:
                    assert await code_of(address, client, method, request) == expected
                refusals = [line["reason"] for line in logs if line["event"] == "call refused"]
                assert refusals == ([] if allowed else ["role"])


async def test_without_a_certificate_nobody_gets_in(secrets: Secrets, tmp_path: Path) -> None:
    stranger = Secrets(tmp_path / "stranger").certificate("operator")
    own = secrets.certificate("operator")
    trusting = own.model_copy(update={"certificate": None, "key": None})
    foreign = own.model_copy(update={"certificate": stranger.certificate, "key": stranger.key})
    async with serving(secrets.certificate("queue")) as address:
        for client in (SecurityConfig(), trusting, foreign):
            assert await code_of(address, client, "Status", CALLS["Status"]) == "unavailable"
        assert await code_of(address, own, "Status", CALLS["Status"]) == "ok"


async def test_a_certificate_without_a_role_may_do_nothing(secrets: Secrets) -> None:
    async with serving(secrets.certificate("queue")) as address:
        client = secrets.certificate("queue")
        assert await code_of(address, client, "Status", CALLS["Status"]) == "permission_denied"


async def test_an_expired_certificate_does_not_get_in(tmp_path: Path) -> None:
    old = datetime.now(UTC) - timedelta(days=CERTIFICATE_DAYS + 1)
    secrets = Secrets(tmp_path / "old", old)
    async with serving(secrets.certificate("queue")) as address:
        client = secrets.certificate("operator")
        assert await code_of(address, client, "Status", CALLS["Status"]) == "unavailable"


async def test_a_server_must_be_who_it_says(secrets: Secrets) -> None:
    async with serving(secrets.certificate("queue")) as address:
        client = secrets.certificate("operator").model_copy(update={"server_name": "another"})
        assert await code_of(address, client, "Status", CALLS["Status"]) == "unavailable"


async def test_a_renewed_certificate_needs_no_restart(secrets: Secrets, tmp_path: Path) -> None:
    new = Secrets(tmp_path / "new")
    async with serving(secrets.certificate("queue")) as address:
        shutil.rmtree(secrets.directory)
        shutil.copytree(new.directory, secrets.directory)
        client = secrets.certificate("operator")
        assert await code_of(address, client, "Status", CALLS["Status"]) == "ok"


async def test_a_missing_foreign_or_replayed_token_is_refused_and_logged(
    secrets: Secrets, tmp_path: Path
) -> None:
    other = Secrets(tmp_path / "other")
    server = secrets.certificate("queue", accepted_tokens=secrets.tokens)
    own = secrets.token("operator")
    async with serving(server) as address:
        without = own.model_copy(update={"token_file": None})
        foreign = own.model_copy(update={"token_file": other.tokens / "operator"})
        for client, reason in ((without, "missing"), (foreign, "Signature")):
            with structlog.testing.capture_logs() as logs:
                code = await code_of(address, client, "Status", CALLS["Status"])
            assert code == "unauthenticated"
            (line,) = [line for line in logs if line["event"] == "call refused"]
            assert line["reason"] == "token" and reason in line["detail"]

        token = rpc.Signer(rpc.KeyFiles(secrets.tokens / "operator")).token(
            "/leeway.v1.TrajectoryQueue/Status"
        )
        async with rpc.connect(address, without) as channel:
            stub = queue_pb2_grpc.TrajectoryQueueStub(channel)
            header = (("authorization", f"Bearer {token}"),)
            await stub.Status(pb.StatusRequest(), timeout=10, metadata=header)
            with structlog.testing.capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError):
                await stub.Status(pb.StatusRequest(), timeout=10, metadata=header)
        assert "used before" in [line["detail"] for line in logs if "detail" in line]


async def test_a_message_beyond_the_limit_is_refused_logged_and_not_tried_again(
    secrets: Secrets,
) -> None:
    client = secrets.certificate("rollout")
    async with (
        serving(secrets.certificate("queue")) as address,
        rpc.connect(address, client) as channel,
    ):
        stub = queue_pb2_grpc.TrajectoryQueueStub(channel)
        large, huge = "x" * (LIMIT + 1), "x" * (8 * LIMIT)
        for text, lines in ((large, 1), (huge, 0)):
            request = pb.ExtendRequest(waiting_for=text)
            with (
                structlog.testing.capture_logs() as logs,
                pytest.raises(WireError, match="resource_exhausted"),
            ):
                await rpc.call(stub.Extend, request, what="extend", deadline_seconds=30)
            assert len([line for line in logs if line.get("reason") == "size"]) == lines


async def test_health_answers_anybody_who_gets_through_tls(secrets: Secrets) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    server = secrets.certificate("queue", accepted_tokens=secrets.tokens)
    client = secrets.token("operator").model_copy(update={"token_file": None})
    async with serving(server) as address, rpc.connect(address, client) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=10
        )
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_every_method_of_the_wire_has_its_roles() -> None:
    for file in (pb, weights_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                assert may_call(f"/{service.full_name}/{method.name}"), method.full_name
    assert not may_call("/leeway.v1.TrajectoryQueue/Unknown")
