"""The OpenEnv adapter against OpenEnv's real server: `make test-openenv`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from transformers import AutoTokenizer

from leeway.config import Config
from leeway.errors import InfrastructureError, RewardError
from leeway.trajectory import Sampling, Task
from rollout_service.engines.torch_engine import TorchEngine
from rollout_service.sandbox.pool import WorkerPool
from rollout_service.sandbox.work import Caller, Work
from rollout_service.workflows.base import Event, Finished, Sample
from rollout_service.workflows.choose import open_workflow
from tests.gateway import agent_model

PYTHON = os.environ.get("LEEWAY_OPENENV_PYTHON", "")
SERVER = Path(__file__).parents[1] / "openenv" / "guess.py"
ADAPTER = "rollout_service.adapters:OpenEnv"
_START_SECONDS = 60.0

needs_openenv = pytest.mark.skipif(not PYTHON, reason="LEEWAY_OPENENV_PYTHON is not set")


@contextlib.asynccontextmanager
async def environment(kind: str = "guess") -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([PYTHON, str(SERVER), str(port), kind])
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(_START_SECONDS), httpx.AsyncClient() as http:
            while True:
                assert server.poll() is None
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"{url}/health")).status_code == 200:
                        break
                await asyncio.sleep(0.05)
        yield url
    finally:
        server.kill()
        server.wait()


@contextlib.asynccontextmanager
async def episodes(count: int = 1) -> AsyncIterator[list[Caller]]:
    async with contextlib.AsyncExitStack() as stack:
        workers = await stack.enter_async_context(
            WorkerPool(Work("environment", ADAPTER, processes=count, seconds=20.0))
        )
        yield [await stack.enter_async_context(workers.take()) for _ in range(count)]


@needs_openenv
async def test_an_episode_of_text() -> None:
    async with environment() as url, episodes() as (ask,):
        for secret in ("3", "5"):
            row = {"environment": url, "reset": {"secret": secret}, "answer": "unused"}
            begun = await ask({"reset": row})
            assert begun["messages"] == [{"role": "user", "content": "Guess."}]
            assert begun["stepwise"]
            wrong = await ask({"step": "I say 9"})
            assert wrong == {"observation": "wrong", "reward": -0.1, "done": False}
            right = await ask({"step": f"I say {secret}"})
            assert right == {"observation": "right", "reward": 1.0, "done": True}
            assert await ask({"score": ""}) == {"outcome": None}


@needs_openenv
async def test_actions_of_several_fields_are_json() -> None:
    async with environment("move") as url, episodes() as (ask,):
        begun = await ask({"reset": {"environment": url, "reset": {"seed": 4}}})
        assert begun["messages"][0]["content"] == '{"rows": 4, "told": "go"}'
        for said, told in [("left", "error: answer with a JSON object: "), ("{}", "error: ")]:
            answer = await ask({"step": said})
            assert answer["observation"].startswith(told)
            assert (answer["reward"], answer["done"]) == (None, False)
        assert "row" in answer["observation"]
        answer = await ask({"step": '{"row": 2, "column": "b"}'})
        assert answer["observation"] == '{"rows": 2, "told": "b"}'
        assert (answer["reward"], answer["done"]) == (0.5, True)


@needs_openenv
async def test_what_breaks_there_is_the_environments_fault() -> None:
    async with environment() as url, episodes() as (ask,):
        await ask({"reset": {"environment": url}})
        with pytest.raises(RewardError, match=r"step raised RuntimeError: OpenEnv step: .*broke"):
            await ask({"step": "break"})


@needs_openenv
async def test_a_server_that_is_full_or_away_is_infrastructure() -> None:
    async with episodes(3) as (first, second, third):
        async with environment() as url:
            await first({"reset": {"environment": url}})
            await second({"reset": {"environment": url}})
            with pytest.raises(InfrastructureError, match="needs what is away"):
                await third({"reset": {"environment": url}})
            # An episode that begins anew ends the session of the last.
            await first({"reset": {"environment": url}})
        with pytest.raises(InfrastructureError, match="OpenEnv step"):
            await second({"step": "1"})
        with pytest.raises(InfrastructureError, match="needs what is away"):
            await third({"reset": {"environment": url}})


@needs_openenv
async def test_a_policy_plays_and_its_turns_are_rated(tmp_path: Path) -> None:
    model = agent_model.build(tmp_path / "model")
    task: dict[str, Any] = {"jsonl": "unused.jsonl", "environment": ADAPTER}
    settings = {"model": {"path": str(model)}, "task": task, "sampling": {"max_new_tokens": 64}}
    config = Config.model_validate(settings)
    engine = TorchEngine(model, concurrency=4)
    told: list[Event] = []

    async def tell(event: Event) -> None:
        told.append(event)

    try:
        async with (
            environment() as url,
            open_workflow(config, engine, AutoTokenizer.from_pretrained(model), "node") as workflow,
        ):
            played = Task(
                task_id="t",
                sequence=0,
                messages=({"role": "user", "content": "unused"},),
                columns={
                    "environment": url,
                    "reset": {"question": "add 3 4", "secret": "tool_call"},
                },
                group_size=1,
                sampling=Sampling(temperature=0.0, max_new_tokens=64),
                seed=1,
            )
            await workflow.run([Sample("s", played, 0)], tell)
    finally:
        await engine.close()
    (finished,) = [event for event in told if isinstance(event, Finished)]
    trajectory = finished.trajectory
    assert (trajectory.reward, trajectory.score) == (1.0, 1.0)
    assert float(trajectory.extras["turn_rewards"][-1]) == 1.0
