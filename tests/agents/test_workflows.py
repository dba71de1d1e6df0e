"""Three ways to write an agent, one trajectory out; every fault is typed, none is a reward of 0."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import psutil
import pytest
from transformers import AutoTokenizer

from leeway.config import Config
from leeway.errors import ConfigError
from leeway.trajectory import Sampling, Task, Trajectory
from rollout_service.engines.torch_engine import TorchEngine
from rollout_service.workflows.base import (
    Event,
    Failed,
    Finished,
    Generated,
    Interrupted,
    Sample,
    Workflow,
)
from rollout_service.workflows.choose import open_workflow
from tests import sandboxes
from tests.gateway import agent_model
from tests.waiting import children
from trajectory_queue.client import FailureKind

WRITTEN = Path(__file__).with_name("written.py")
COMMAND = Path(__file__).with_name("command.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agent_model.build(tmp_path_factory.mktemp("agent-model"))


@pytest.fixture
async def opened(model: Path) -> AsyncIterator[Callable[..., Any]]:
    """Opens workflows by what `task` says."""
    engine = TorchEngine(model, concurrency=16)

    @asynccontextmanager
    async def opening(place: str = "node", **task: Any) -> AsyncIterator[Workflow]:
        settings: dict[str, Any] = {
            "model": {"path": str(model)},
            "task": {"jsonl": "unused.jsonl", **task},
            "sampling": {"max_new_tokens": 64},
        }
        tokenizer = AutoTokenizer.from_pretrained(model)
        async with AsyncExitStack() as stack:
            if place == "sandbox":
                sandbox = sandboxes.configuration(**task)
                address = await stack.enter_async_context(sandboxes.serving(sandbox))
                settings["rollout"] = {"sandbox": {"address": address}}
            config = Config.model_validate(settings)
            yield await stack.enter_async_context(open_workflow(config, engine, tokenizer, "node"))

    try:
        yield opening
    finally:
        await engine.close()


def samples(count: int = 1, **columns: Any) -> list[Sample]:
    messages = ({"role": "user", "content": "add 3 4"},)
    sampling = Sampling(temperature=0.0, max_new_tokens=64)
    task = Task("t", 0, messages, columns, max(count, 2), sampling, 3)
    return [Sample(f"lease/{index}", task, index) for index in range(count)]


async def events(workflow: Workflow, given: list[Sample]) -> list[Event]:
    """What became of each sample; that nothing more is generated for it was told before."""
    told: list[Event] = []

    async def tell(event: Event) -> None:
        told.append(event)

    async with asyncio.timeout(60):
        await workflow.run(given, tell)
    for sample in given:
        first, second = [event for event in told if event.sample is sample]
        assert isinstance(first, Generated)
        assert not isinstance(second, Generated)
    return [event for event in told if not isinstance(event, Generated)]


async def finished(workflow: Workflow, **columns: Any) -> Trajectory:
    (event,) = await events(workflow, samples(**columns))
    assert isinstance(event, Finished), event
    return event.trajectory


async def failure(workflow: Workflow) -> tuple[FailureKind, str]:
    (event,) = await events(workflow, samples())
    assert isinstance(event, Failed), event
    return event.kind, event.reason


def trained(trajectory: Trajectory) -> str:
    response = trajectory.token_ids[trajectory.prompt_length :]
    return str(agent_model.tokenizer().decode(response[trajectory.loss_mask]))


# Environments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", sandboxes.PLACES)
async def test_an_environment_with_tools(opened: Any, place: str) -> None:
    async with opened(place, environment=f"{WRITTEN}:Adder") as workflow:
        right = await finished(workflow, answer="7", unused=1)
        wrong = await finished(workflow, answer="8")
    assert trained(right) == f"{agent_model.call_text(3, 4)}<|im_end|>It is 7.<|im_end|>"
    assert (right.score, right.reward, dict(right.reward_parts)) == (1.0, 1.0, {"length": 8.0})
    assert wrong.score == 0.0
    assert right.branch_starts == ()
    assert not right.loss_mask.all()


@pytest.mark.parametrize("place", sandboxes.PLACES)
async def test_an_environment_that_steps(opened: Any, place: str) -> None:
    gymnastic = WRITTEN.with_name("gymnastic.py")
    for spec, turns, reward in [
        (f"{WRITTEN}:Walk", 3, 1.5),
        (f"{gymnastic}:Gymnastic", 1, 1.0),
    ]:
        async with opened(place, environment=spec) as workflow:
            trajectory = await finished(workflow)
        assert trajectory.reward == trajectory.score == reward
        turn_rewards = trajectory.extras["turn_rewards"]
        assert np.count_nonzero(turn_rewards) == turns
        assert turn_rewards.sum() == pytest.approx(reward)


@pytest.mark.parametrize("place", sandboxes.PLACES)
async def test_arguments_that_do_not_fit_are_told_to_the_model(opened: Any, place: str) -> None:
    async with opened(place, environment=f"{WRITTEN}:Strict", environment_turns=2) as workflow:
        trajectory = await finished(workflow)
    response = trajectory.token_ids[trajectory.prompt_length :]
    told = agent_model.tokenizer().decode(response[~trajectory.loss_mask])
    assert "error: a: Input should be a valid boolean" in told
    assert "b: Input should be a valid list" in told


@pytest.mark.parametrize(
    ("name", "options", "kind", "reason"),
    [
        ("Broken", {}, FailureKind.REWARD, "add raised ZeroDivisionError: in the tool"),
        ("Hangs", {"environment_seconds": 1}, FailureKind.REWARD, "task.environment_seconds"),
        ("Dies", {}, FailureKind.INFRASTRUCTURE, "exit status 3"),
        ("Hungry", {"memory_bytes": 1 << 30}, FailureKind.REWARD, "MemoryError"),
        ("Floods", {}, FailureKind.REWARD, "return less than"),
        ("Untyped", {}, FailureKind.REWARD, "its parameter 'a' has no type"),
    ],
)
@pytest.mark.parametrize("place", sandboxes.PLACES)
async def test_an_environment_s_fault_is_its_episode_s_alone(
    opened: Any, place: str, name: str, options: Any, kind: FailureKind, reason: str
) -> None:
    started = time.monotonic()
    async with opened(place, environment=f"{WRITTEN}:{name}", **options) as workflow:
        found, text = await failure(workflow)
    assert found is kind
    assert reason in text
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("place", sandboxes.PLACES)
async def test_episodes_have_processes_of_their_own(opened: Any, place: str) -> None:
    async with opened(place, environment=f"{WRITTEN}:Adder", environment_processes=3) as workflow:
        ended = await events(workflow, samples(6))
        assert all(isinstance(event, Finished) for event in ended)
        assert len(_children("sandbox")) == 3
    assert not _children("sandbox")


# Agents -------------------------------------------------------------------------------------------


async def test_a_program_that_returns_a_number(opened: Any) -> None:
    async with opened(agent=f"{WRITTEN}:good") as workflow:
        ended = await events(workflow, samples(5))
        assert len(_children("sandbox")) == 1
    assert [event.trajectory.score for event in ended if isinstance(event, Finished)] == [1.0] * 5
    assert not _children("sandbox")


async def test_a_program_that_returns_parts(opened: Any) -> None:
    async with opened(agent=f"{WRITTEN}:parts") as workflow:
        trajectory = await finished(workflow)
    assert (trajectory.score, trajectory.reward) == (1.0, 0.5)
    assert dict(trajectory.reward_parts) == {"format": 0.25, "index": 0.0}


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("says_nothing", FailureKind.REWARD, "without a reward"),
        ("asks_nobody", FailureKind.DATA, "without an answer of the model"),
        ("raises", FailureKind.REWARD, "raised LookupError: in the agent"),
        ("returns_text", FailureKind.REWARD, "returned '1.0' (str)"),
        ("waits", FailureKind.INFRASTRUCTURE, "task.session_seconds"),
    ],
)
async def test_a_program_s_fault_is_typed(
    opened: Any, name: str, kind: FailureKind, reason: str
) -> None:
    seconds = 3 if name == "waits" else 60
    async with opened(agent=f"{WRITTEN}:{name}", session_seconds=seconds) as workflow:
        found, text = await failure(workflow)
    assert found is kind
    assert reason in text


async def test_a_program_that_blocks_is_ended_and_the_next_ones_run(opened: Any) -> None:
    async with opened(agent=f"{WRITTEN}:blocks_sometimes", session_seconds=12) as workflow:
        first = await events(workflow, samples(2))
        assert {type(event) for event in first} <= {Failed, Finished}
        kinds = {event.kind for event in first if isinstance(event, Failed)}
        assert kinds == {FailureKind.INFRASTRUCTURE}
        assert (await finished(workflow)).score == 1.0


async def test_a_program_that_cannot_be_used_is_known_before_any_task(opened: Any) -> None:
    with pytest.raises(ConfigError, match="is no `async def run"):
        async with opened(agent=f"{WRITTEN}:not_async"):
            pass
    with pytest.raises(ConfigError, match="no function 'missing'"):
        async with opened(environment=f"{WRITTEN}:missing"):
            pass


async def test_a_command_gets_a_base_url_and_a_key(opened: Any) -> None:
    async with opened(agent=[sys.executable, str(COMMAND), "works"]) as workflow:
        trajectory = await finished(workflow)
    assert trajectory.reward == 0.5
    async with opened(agent=[sys.executable, str(COMMAND), "fails"]) as workflow:
        kind, reason = await failure(workflow)
    assert kind is FailureKind.REWARD
    assert "status 1; it said: no luck" in reason


async def test_a_program_elsewhere_opens_a_session(opened: Any) -> None:
    async with opened(agent="external") as workflow:
        url = _listening()
        running = asyncio.create_task(events(workflow, samples(2)))
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            for _ in range(2):
                session = await _open(http)
                headers = {"Authorization": f"Bearer {session['api_key']}"}
                body = {"model": "m", "messages": session["task"]["messages"]}
                await http.post("/v1/chat/completions", json=body, headers=headers)
                path = f"/sessions/{session['id']}/close"
                await http.post(path, json={"score": session["task"]["index"]}, headers=headers)
            assert (await http.post("/sessions")).status_code == 429
        ended = await running
    scores = sorted(e.trajectory.score or 0.0 for e in ended if isinstance(e, Finished))
    assert scores == [0.0, 1.0]


async def test_an_aborted_session_is_interrupted(opened: Any) -> None:
    async with opened(agent=f"{WRITTEN}:waits") as workflow:
        given = samples(2)
        running = asyncio.create_task(events(workflow, given))
        async with asyncio.timeout(30):
            while workflow.progress(["lease/0"]) == 0:
                await asyncio.sleep(0.01)
        await workflow.abort(["lease/0", "lease/1"])
        ended = await running
    assert [type(event) for event in ended] == [Interrupted, Interrupted]


async def test_a_gateway_that_others_reach_needs_a_token(model: Path) -> None:
    config = Config.model_validate(
        {
            "model": {"path": str(model)},
            "task": {"jsonl": "unused.jsonl", "agent": "external"},
            "sampling": {"max_new_tokens": 64},
            "rollout": {"gateway": {"address": "0.0.0.0:0"}},
        }
    )
    engine = TorchEngine(model, concurrency=1)
    try:
        with pytest.raises(ConfigError, match=r"set rollout\.gateway\.token"):
            async with open_workflow(config, engine, AutoTokenizer.from_pretrained(model), "node"):
                pass
    finally:
        await engine.close()


async def _open(http: httpx.AsyncClient) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while (answer := await http.post("/sessions")).status_code == 429:
            await asyncio.sleep(0.01)
    opened: dict[str, Any] = answer.json()
    return opened


def _listening() -> str:
    """Where this process serves."""
    ports = [
        connection.laddr.port
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    return f"http://127.0.0.1:{ports[-1]}"


def _children(word: str) -> list[psutil.Process]:
    return children(os.getpid(), lambda command: any(word in part for part in command))
