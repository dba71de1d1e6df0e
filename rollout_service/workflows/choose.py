"""Picks the workflow that the configuration asks for, and keeps what it needs running."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import structlog

from leeway.config import Config, GatewayConfig
from leeway.errors import ConfigError
from rollout_service.answers import AnswerFormat
from rollout_service.engines.base import Engine
from rollout_service.gateway.answering import Gateway
from rollout_service.gateway.server import build_app, serve
from rollout_service.prompts import Renderer
from rollout_service.rewards import Scorer
from rollout_service.rewards.judges import Judges
from rollout_service.sandbox.agents import AgentProcess
from rollout_service.sandbox.pool import WorkerPool
from rollout_service.sandbox.remote import sandboxes
from rollout_service.sandbox.work import Work, Workers
from rollout_service.workflows.agents import Agents, Program
from rollout_service.workflows.base import Workflow
from rollout_service.workflows.environment import EnvironmentProgram
from rollout_service.workflows.programs import CommandProgram, ExternalProgram, FunctionProgram
from rollout_service.workflows.single_turn import SingleTurn

log = structlog.get_logger(__name__)

EXTERNAL = "external"


@asynccontextmanager
async def open_workflow(
    config: Config, engine: Engine, tokenizer: Any, node_id: str
) -> AsyncIterator[Workflow]:
    """The workflow of `task.reward`, `task.environment` or `task.agent`.

    Raises:
        ConfigError: what the user wrote cannot be used, or a judge does not let its key in.
        DeadlineError: a judge is away, or the sandbox.
    """
    task = config.task
    task.check_scored()
    renderer = Renderer(tokenizer, engine.context_length, config.sampling.max_new_tokens)
    async with AsyncExitStack() as stack:
        judges = await stack.enter_async_context(Judges(task.judges))
        if task.environment is None and task.agent is None:
            workers = await stack.enter_async_context(_workers(config, judges))
            yield SingleTurn(engine, renderer, Scorer(workers), node_id)
            return
        gateway = Gateway(
            engine,
            renderer,
            AnswerFormat(tokenizer),
            max_requests=config.rollout.gateway.max_requests,
        )
        if task.environment is not None:
            workers = await stack.enter_async_context(_workers(config, judges))
            program: Program = EnvironmentProgram(
                workers, task.environment_turns, task.session_seconds
            )
        else:
            program = await stack.enter_async_context(_agent(config, gateway))
        yield Agents(gateway, program, node_id, task.session_seconds)


@asynccontextmanager
async def _workers(config: Config, judges: Judges) -> AsyncIterator[Workers]:
    """Of the reward function or the environment: here, or at `rollout.sandbox`."""
    work, address = Work.of(config.task), config.rollout.sandbox.address
    if address is None:
        async with WorkerPool(work, judges) as pool:
            yield pool
    else:
        async with sandboxes(config, address, work, judges) as remote:
            yield remote


def _gateway_token(settings: GatewayConfig) -> str | None:
    if settings.token_file is None:
        return settings.token.get_secret_value() if settings.token is not None else None
    try:
        return settings.token_file.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"rollout.gateway.token_file = {settings.token_file}: {error.strerror}"
        ) from error


@asynccontextmanager
async def _agent(config: Config, gateway: Gateway) -> AsyncIterator[Program]:
    """The program of `task.agent`, behind the gateway's HTTP server.

    Raises:
        ConfigError: the server would be open to others, or the agent cannot be used.
    """
    agent, settings = config.task.agent, config.rollout.gateway
    certificate, key = config.security.certificate, config.security.key
    external = ExternalProgram()
    token = _gateway_token(settings)
    if token is None and not settings.address.startswith(("127.0.0.1:", "localhost:", "[::1]:")):
        raise ConfigError(
            f"rollout.gateway.address = {settings.address}: reachable from elsewhere; set "
            "rollout.gateway.token or token_file, or use 127.0.0.1"
        )
    app = build_app(gateway, config.model.path, external, token)
    async with serve(app, settings.address, certificate, key) as address:
        host, _, port = address.rpartition(":")
        scheme = "http" if certificate is None else "https"
        reachable = "127.0.0.1" if host in ("0.0.0.0", "::", "[::]") else host
        base_url = f"{scheme}://{reachable}:{port}/v1"
        log.info("gateway", address=address)
        if agent == EXTERNAL:
            yield external
        elif isinstance(agent, tuple):
            yield CommandProgram(agent, base_url)
        else:
            assert agent is not None  # that is why there is a gateway
            async with AgentProcess(agent, config.task.memory_bytes) as process:
                yield FunctionProgram(process, base_url)
