"""Judges: real servers on HTTP, asked by reward functions in their processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import SecretStr

from leeway import config as configuration
from leeway.config import Config, EndpointConfig
from leeway.errors import ConfigError, DeadlineError, InfrastructureError, RewardError
from rollout_service.evaluation import evaluate
from rollout_service.gateway.server import serve
from rollout_service.rewards import Scorer
from rollout_service.rewards.judges import Judges
from tests import llama_cpp
from tests.sandboxes import PLACES, workers

JUDGED = "tests/rewards/judged.py"
KEY = "judge-key-9f3"


@dataclass
class Server:
    """A judge that answers with the question's own text, as its tests tell it to.

    Attributes:
        faults: What it does to the next requests, instead of answering: a status, or "cut".
        hold: While it is clear, requests wait.
    """

    url: str = ""
    faults: list[Any] = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    asked: int = 0
    under_way: int = 0
    most_under_way: int = 0

    def config(self, **settings: Any) -> EndpointConfig:
        given = {"api_key": SecretStr(KEY), **settings}
        return EndpointConfig(url=self.url, model="judge", **given)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    state = Server()
    state.hold.set()
    app = FastAPI()

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": f"{request.headers.get('authorization')}?"}, 401)
        return JSONResponse({"data": [{"id": "judge"}]})

    @app.post("/v1/{path:path}")
    async def answer(path: str, request: Request) -> Response:
        state.asked += 1
        state.under_way += 1
        state.most_under_way = max(state.most_under_way, state.under_way)
        try:
            await state.hold.wait()
            await asyncio.sleep(0.02)
            body = json.loads(await request.body())
            if state.faults:
                fault = state.faults.pop(0)
                headers = {"Retry-After": "0.2"} if fault == 429 else {}
                told = f"status {fault} for {request.headers['authorization']}"
                return Response(told, status_code=fault, headers=headers)
            if path == "score":
                return JSONResponse({"score": len(body["text"]), "model": body["model"]})
            text = body["messages"][-1]["content"]
            return JSONResponse({"choices": [{"message": {"content": text}}]})
        finally:
            state.under_way -= 1

    async with serve(app, "127.0.0.1:0") as address:
        state.url = f"http://{address}/v1"
        yield state


@pytest.fixture(params=PLACES)
def judged(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Opens what scores by a function with a judge, on the node or at a sandbox."""

    @contextlib.asynccontextmanager
    async def opening(
        name: str, config: EndpointConfig, *, processes: int = 1, seconds: float = 20.0
    ) -> AsyncIterator[Scorer]:
        task = {"reward": f"{JUDGED}:{name}", "reward_processes": processes}
        grader = {"grader": config}
        async with workers(request.param, grader, **task, reward_seconds=seconds) as opened:
            yield Scorer(opened)

    return opening


# What a function may ask -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"), [("echo", 5.0), ("many", 10.0), ("threads", 10.0), ("routes", 1.0)]
)
async def test_a_function_asks_its_judge(
    judged: Any, server: Server, name: str, expected: float
) -> None:
    async with judged(name, server.config()) as rewards:
        for _ in range(2):
            assert await rewards.score("5", {}) == expected


async def test_a_real_language_model_judges(judged: Any, tmp_path: Path) -> None:
    async with llama_cpp.running(tmp_path) as url:
        config = EndpointConfig(url=url, model="tiny")
        async with judged("plain", config) as rewards:
            assert 0 < await rewards.score("Is this good?", {}) <= 8


@pytest.mark.parametrize("place", PLACES)
async def test_an_environment_asks_its_judge(server: Server, place: str) -> None:
    grader = {"grader": server.config()}
    async with (
        workers(place, grader, environment=f"{JUDGED}:Debate") as opened,
        opened.take() as ask,
    ):
        begun = await ask({"reset": {"topic": "sums"}})
        assert [tool["name"] for tool in begun["tools"]] == ["consult"]
        told = await ask({"call": "consult", "arguments": {"question": "why?"}})
        assert told == {"result": "why?"}
        assert await ask({"score": "0.5"}) == {"outcome": {"score": 0.5}}


async def test_the_limit_holds_over_all_processes_of_a_node(judged: Any, server: Server) -> None:
    async with judged("many", server.config(concurrency=2), processes=4) as rewards:
        scores = await asyncio.gather(*(rewards.score("", {}) for _ in range(8)))
    assert scores == [10.0] * 8
    assert server.asked == 32
    assert server.most_under_way == 2


# What may go wrong -------------------------------------------------------------------------------


async def test_what_trying_again_cures_is_tried_again(judged: Any, server: Server) -> None:
    server.faults = [503, 429, 500]
    async with judged("echo", server.config()) as rewards:
        assert await rewards.score("7", {}) == 7.0
    assert server.asked == 4


@pytest.mark.parametrize("name", ["echo", "swallows", "many"])
async def test_a_judge_that_fails_is_never_a_score(judged: Any, server: Server, name: str) -> None:
    """Also where the function takes every exception for a 0."""
    server.faults = [500] * 1000
    async with judged(name, server.config(seconds=2.0)) as rewards:
        with pytest.raises(
            InfrastructureError, match=r"was not done after 2 s; last: .*status 500"
        ):
            await rewards.score("1", {})
        server.faults.clear()
        # The process lives, and its pipe is in step.
        assert await rewards.score("1", {}) == (10.0 if name == "many" else 1.0)


async def test_a_judge_that_hangs_is_infrastructure(judged: Any, server: Server) -> None:
    server.hold.clear()
    async with judged("echo", server.config(seconds=2.0)) as rewards:
        with pytest.raises(
            InfrastructureError, match=r"was not done after 2 s; last: no answer came"
        ):
            await rewards.score("1", {})
    server.hold.set()


async def test_a_judge_that_goes_away_is_infrastructure(judged: Any, server: Server) -> None:
    async with judged("swallows", server.config()) as rewards:
        server.faults = [401]
        with pytest.raises(InfrastructureError, match="status 401") as raised:
            await rewards.score("1", {})
    assert KEY not in str(raised.value)
    assert "(secret)" in str(raised.value)


async def test_time_at_the_judge_is_not_the_functions_own(judged: Any, server: Server) -> None:
    server.hold.clear()
    async with judged("echo", server.config(), seconds=0.5) as rewards:
        scoring = asyncio.create_task(rewards.score("3", {}))
        await asyncio.sleep(1.0)  # Longer than the function may take itself.
        server.hold.set()
        assert await scoring == 3.0


async def test_its_own_time_is_the_functions_fault(judged: Any, server: Server) -> None:
    async with judged("slow_itself", server.config(), seconds=0.5) as rewards:
        with pytest.raises(RewardError, match=r"was not done after 0.5 s and was killed"):
            await rewards.score("", {})


async def test_a_function_that_asks_for_ever_is_ended(judged: Any, server: Server) -> None:
    async with judged("asks_for_ever", server.config()) as rewards:
        with pytest.raises(RewardError, match="turned to its judges 100 times in one call"):
            await rewards.score("", {})
        assert server.asked == 100


async def test_a_refused_question_is_the_functions_to_handle(judged: Any, server: Server) -> None:
    server.faults = [400, 422]
    async with judged("handles_refusals", server.config()) as rewards:
        assert await rewards.score("1", {}) == -1.0
    async with judged("echo", server.config()) as rewards:
        with pytest.raises(RewardError, match=r"raised .*JudgeRefusedError: .*status 422"):
            await rewards.score("1", {})


# Before any task is leased -----------------------------------------------------------------------


async def test_a_wrong_key_is_a_config_error_that_does_not_show_it(server: Server) -> None:
    with pytest.raises(ConfigError, match="status 401") as raised:
        async with Judges({"grader": server.config(api_key=SecretStr("another-key"))}):
            pass
    assert "another-key" not in str(raised.value)


async def test_a_judge_that_is_away_is_said_at_the_start() -> None:
    away = EndpointConfig(url="http://127.0.0.1:9/v1", model="judge", seconds=0.3)
    with pytest.raises(DeadlineError, match=r"task.judges.grader: http://127.0.0.1:9/v1/models"):
        async with Judges({"grader": away}):
            pass


async def test_a_judge_that_nobody_can_ask_is_a_config_error(server: Server) -> None:
    grader = {"grader": server.config()}
    with pytest.raises(ConfigError, match=r"has no parameter for the judges \['grader'\]"):
        async with workers("node", grader, reward=f"{JUDGED}:no_parameter"):
            pass


async def test_a_judge_and_a_column_of_one_name(judged: Any, server: Server) -> None:
    async with judged("echo", server.config()) as rewards:
        with pytest.raises(RewardError, match="'grader' is a judge and a column of the row"):
            await rewards.score("1", {"grader": "x"})


# The key -----------------------------------------------------------------------------------------


async def test_the_users_code_never_sees_the_key(
    judged: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEEWAY__TASK__JUDGES__GRADER__API_KEY", KEY)
    async with judged("surroundings", server.config()) as rewards:
        assert await rewards.score("", {}) == 1.0


def test_the_configuration_names_judges_and_hides_their_keys(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {path: m}\n"
        "task:\n"
        "  jsonl: t.jsonl\n"
        "  reward: r.py:reward\n"
        "  judges:\n"
        "    grader: {url: 'http://127.0.0.1:1/v1', model: m}\n"
    )
    environment = {"LEEWAY__TASK__JUDGES__GRADER__API_KEY": KEY}
    config = configuration.load(path, environ=environment)
    key = config.task.judges["grader"].api_key
    assert key is not None
    assert key.get_secret_value() == KEY
    assert KEY not in config.to_yaml() + repr(config)
    with pytest.raises(ConfigError, match="unknown key; did you mean 'concurrency'"):
        configuration.load(path, ["task.judges.grader.concurency=3"])
    with pytest.raises(ConfigError, match=r"task.judges are asked by task.reward or"):
        configuration.load(path, ["task.reward=null", "task.agent=external"])


# Evaluation --------------------------------------------------------------------------------------


def _run(tmp_path: Path, **task: Any) -> Config:
    rows = [{"prompt": str(number), "answer": str(number % 2)} for number in range(6)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    reward = tmp_path / "same.py"
    reward.write_text("def reward(completion, prompt):\n    return float(completion == prompt)\n")
    settings = {"jsonl": data, "reward": f"{reward}:reward", "heldout": 4, **task}
    return Config.model_validate(
        {"model": {"path": "m"}, "task": settings, "trainer": {"batch_groups": 2}}
    )


async def test_another_servers_answers_are_scored(server: Server, tmp_path: Path) -> None:
    found = await evaluate(_run(tmp_path), server.config(), samples=2)
    assert found.scores == (1.0,) * 8
    assert found.failures == ()


async def test_an_answer_that_cannot_be_scored_is_no_zero(server: Server, tmp_path: Path) -> None:
    server.faults = [400]
    found = await evaluate(_run(tmp_path), server.config())
    assert found.scores == (1.0,) * 3
    assert len(found.failures) == 1
    assert "status 400" in found.failures[0]


async def test_runs_that_cannot_be_evaluated(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task.heldout = 0"):
        await evaluate(_run(tmp_path, heldout=0), server.config())
    with pytest.raises(ConfigError, match=r"only runs with task.reward"):
        await evaluate(_run(tmp_path, reward=None, agent="external"), server.config())
