"""Over a thousand random sessions, what is trained is what the engine sampled, to the id.

Sessions go through the gateway's HTTP as agents drive it: they continue, go back, forget, ask for
several answers, call tools, stream, stop at texts, retry, and leave before their answer is there.
The witness stands between gateway and engine and writes down what the engine was asked and what it
sampled. The trainer then computes every log-probability again, on the same version.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from leeway.config import TrainerConfig, UpdateMode
from leeway.trajectory import FinishReason, Group, Int32Array, Sampling, Task, Trajectory
from rollout_service.answers import AnswerFormat
from rollout_service.engines.base import GenerateRequest, Generation
from rollout_service.engines.torch_engine import TorchEngine
from rollout_service.gateway.answering import Gateway
from rollout_service.gateway.server import build_app
from rollout_service.gateway.sessions import Session
from rollout_service.prompts import Renderer
from rollout_service.workflows.agents import Agents
from rollout_service.workflows.base import Sample
from tests.gateway import agent_model
from trainer_service.backends.torch_backend import TorchBackend
from trainer_service.batching import pack

SESSIONS = 1000
AT_ONCE = 16
MAX_NEW_TOKENS = 40
LOGPROB_TOLERANCE = 1e-3
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]


class Witness(TorchEngine):
    """Writes down what was asked and what was sampled."""

    sampled: list[tuple[Int32Array, Generation]]

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Generation]:
        return self._watch(
            {request.request_id: request for request in requests}, super().generate(requests)
        )

    async def _watch(
        self, asked: dict[str, GenerateRequest], generations: AsyncIterator[Generation]
    ) -> AsyncIterator[Generation]:
        async for generation in generations:
            self.sampled.append((asked[generation.request_id].prompt.copy(), generation))
            yield generation


class Agent:
    """One random client."""

    def __init__(self, http: httpx.AsyncClient, session: Session, seed: int) -> None:
        self._http = http
        self._headers = {"Authorization": f"Bearer {session.key}"}
        self._random = random.Random(seed)
        self._tools: dict[str, Any] = {"tools": TOOLS} if self._random.random() < 0.7 else {}
        # Conversations that it may go on with, each ending with an answer.
        self._known: list[list[dict[str, Any]]] = []
        self.calls = 0
        self.got = 0

    async def run(self) -> None:
        for _ in range(self._random.randint(1, 5)):
            await self._turn()
        if not self.got:
            await self._ask(self._begin(), {})

    async def _turn(self) -> None:
        messages = self._begin()
        choose = self._random.random()
        options: dict[str, Any] = {}
        if choose < 0.15:
            options["n"] = self._random.randint(2, 3)
        elif choose < 0.3:
            options["stop"] = self._random.choice(['"b"', "It", ["</tool", "7"], "a"])
        elif choose < 0.5:
            options["max_tokens"] = self._random.randint(1, 12)
        if self._random.random() < 0.1:
            await self._leave(messages, options)
        elif self._random.random() < 0.25:
            await self._stream(messages, options)
        else:
            await self._ask(messages, options)

    def _begin(self) -> list[dict[str, Any]]:
        """A conversation that ends where the model is to answer."""
        a, b = self._random.choice(agent_model.SUMS)
        question = {"role": "user", "content": f"add {a} {b}"}
        if not self._known or self._random.random() < 0.15:
            system = [{"role": "system", "content": self._random.choice("abc")}]
            return [*(system if self._random.random() < 0.5 else []), question]
        # Mostly its last conversation, sometimes an earlier one, sometimes with a changed past.
        place = -1 if self._random.random() < 0.7 else self._random.randrange(len(self._known))
        messages = [dict(message) for message in self._known[place]]
        calls = messages[-1].get("tool_calls") or []
        if self._random.random() < 0.05:
            messages[-1]["content"] = "something else"
        if calls and self._random.random() < 0.9:
            results = []
            for call in calls:
                self.calls += 1
                given = json.loads(call["function"]["arguments"])
                total = sum(v for v in given.values() if isinstance(v, int))
                result = {"role": "tool", "tool_call_id": call["id"], "content": str(total)}
                results.append(result)
            return [*messages, *results]
        return [*messages, question]

    def _body(self, messages: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        return {"model": "m", "messages": messages, **self._tools, **options}

    async def _ask(self, messages: list[Any], options: dict[str, Any]) -> None:
        headers = dict(self._headers)
        times = 1
        if self._random.random() < 0.2:
            headers["Idempotency-Key"] = str(self._random.random())
            times = self._random.randint(1, 3)
        body = self._body(messages, options)
        answers = await asyncio.gather(
            *(
                self._http.post("/v1/chat/completions", json=body, headers=headers)
                for _ in range(times)
            )
        )
        if answers[0].status_code == 400:
            assert "context_length_exceeded" in answers[0].text
            self._known.clear()
            return
        assert all(answer.json() == answers[0].json() for answer in answers)
        self.got += 1
        choices = answers[0].json()["choices"]
        self._known.append([*messages, self._random.choice(choices)["message"]])

    async def _stream(self, messages: list[Any], options: dict[str, Any]) -> None:
        body = self._body(messages, {**options, "stream": True})
        async with self._http.stream(
            "POST", "/v1/chat/completions", json=body, headers=self._headers
        ) as response:
            if response.status_code == 400:
                self._known.clear()
                return
            message: dict[str, Any] = {"role": "assistant", "content": ""}
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    if choice["index"] == 0:
                        message["content"] += choice["delta"].get("content") or ""
                        for call in choice["delta"].get("tool_calls") or ():
                            message.setdefault("tool_calls", []).append(call)
        self.got += 1
        self._known.append([*messages, message])

    async def _leave(self, messages: list[Any], options: dict[str, Any]) -> None:
        """Goes before the answer is there, and sometimes comes back for it."""
        headers = {**self._headers, "Idempotency-Key": str(self._random.random())}
        body = self._body(messages, options)
        asking = asyncio.create_task(
            self._http.post("/v1/chat/completions", json=body, headers=headers)
        )
        await asyncio.sleep(self._random.random() * 0.02)
        if not asking.done():
            asking.cancel()
        await asyncio.wait({asking})
        if self._random.random() < 0.5:
            answer = await self._http.post("/v1/chat/completions", json=body, headers=headers)
            if answer.status_code == 200:
                self.got += 1
                self._known.append([*messages, answer.json()["choices"][0]["message"]])


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_thousand_random_sessions(tmp_path: Path, model: Path) -> None:
    second = _moved(model, tmp_path / "second")
    engine = Witness(model, concurrency=AT_ONCE)
    engine.sampled = []
    tokenizer = AutoTokenizer.from_pretrained(model)
    renderer = Renderer(tokenizer, engine.context_length, MAX_NEW_TOKENS)
    gateway = Gateway(engine, renderer, AnswerFormat(tokenizer), max_requests=4 * AT_ONCE)
    seen = _Seen()
    try:
        for version, directory in enumerate([model, second]):
            if version:
                await engine.swap(_weights(directory), version, UpdateMode.IN_PLACE)
            trajectories = await _sessions(gateway, version, seen)
            for trajectory in trajectories:
                _check_ids(trajectory, engine.sampled, version, seen)
            _check_logprobs(trajectories, directory)
    finally:
        await engine.close()
    assert seen.sessions == SESSIONS
    assert min(seen.branches, seen.calls, seen.lengths) > 100, seen
    assert seen.unused > 20, "some answers were sampled and never delivered"


class _Seen:
    """That the sessions were as varied as they should be."""

    sessions = branches = calls = lengths = trained = unused = 0

    def __repr__(self) -> str:
        return str(vars(self))


async def _sessions(gateway: Gateway, version: int, seen: _Seen) -> list[Trajectory]:
    app = build_app(gateway, "m", _Nothing(), token=None)
    workflow = Agents(gateway, _Unused(), "node", 60.0)
    gate = asyncio.Semaphore(AT_ONCE)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:

        async def one(number: int) -> Trajectory:
            async with gate:
                sampling = Sampling(3.0 if number % 3 == 0 else 1.0, max_new_tokens=MAX_NEW_TOKENS)
                task = Task(
                    f"t{number}",
                    number,
                    ({"role": "user", "content": "x"},),
                    {},
                    2,
                    sampling,
                    number,
                )
                session = gateway.open(sampling, number)
                agent = Agent(http, session, number)
                await agent.run()
                await gateway.close(session)
                seen.calls += agent.calls
                seen.sessions += 1
                answers = session.conversation.answers
                seen.unused += len(answers) - len(session.conversation.delivered)
                session.finish(0.0)
                return workflow._trajectory(Sample(str(number), task, 0), session)

        half = SESSIONS // 2
        numbers = range(version * half, (version + 1) * half)
        return await asyncio.gather(*(one(number) for number in numbers))


def _check_ids(
    trajectory: Trajectory,
    sampled: list[tuple[Int32Array, Generation]],
    version: int,
    seen: _Seen,
) -> None:
    """Every run of trained ids is one that the engine sampled behind exactly what is before it."""
    by_prompt: dict[bytes, list[Generation]] = {}
    for prompt, generation in sampled:
        by_prompt.setdefault(prompt.tobytes(), []).append(generation)
    mask = np.concatenate([np.zeros(trajectory.prompt_length, dtype=bool), trajectory.loss_mask])
    logprobs = np.concatenate(
        [np.zeros(trajectory.prompt_length, dtype=np.float32), trajectory.logprobs]
    )
    used: set[int] = set()
    for branch in trajectory.branches():
        place = branch.start
        while place < branch.stop:
            if not mask[place]:
                place += 1
                continue
            known = by_prompt[trajectory.token_ids[branch.start : place].tobytes()]
            end = place
            while end < branch.stop and mask[end]:
                end += 1
            ids = trajectory.token_ids[place:end]
            # A stop text may have ended it before the engine did.
            match = [
                g
                for g in known
                if id(g) not in used
                and np.array_equal(g.token_ids[: ids.size], ids)
                and np.array_equal(g.logprobs[: ids.size], logprobs[place:end])
            ]
            assert match, "these ids were never sampled here"
            used.add(id(match[0]))
            assert {span.version for span in match[0].versions} == {version}
            place = end
    assert set(trajectory.token_versions()[trajectory.loss_mask].tolist()) == {version}
    seen.branches += len(trajectory.branch_starts)
    seen.lengths += trajectory.finish_reason is FinishReason.LENGTH
    seen.trained += trajectory.trained_tokens


def _check_logprobs(trajectories: Sequence[Trajectory], directory: Path) -> None:
    backend = TorchBackend(directory, TrainerConfig(microbatch_tokens=8192))
    groups = [
        Group(Task(t.task_id, 0, ({"role": "user", "content": "x"},), {}, 2, t.sampling, 0), (t,))
        for t in trajectories
    ]
    ones = np.ones(len(trajectories))
    plan = pack(groups, ones, ones, 8192)
    worst = 0.0
    tokens = 0
    for batch, logprobs in zip(plan.microbatches, backend.scores(plan.microbatches), strict=True):
        worst = max(worst, float(np.abs(logprobs - batch.behaviour).max()))
        tokens += logprobs.size
    assert tokens == sum(t.trained_tokens for t in trajectories)
    assert worst < LOGPROB_TOLERANCE, worst
    print(f"{tokens} trained tokens, largest difference {worst:.2e}")


def _moved(model: Path, directory: Path) -> Path:
    """The model with other weights."""
    moved = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    moved.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(model).save_pretrained(directory)
    return directory


def _weights(directory: Path) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    return {
        name: tensor.detach().view(torch.int16).numpy().view(np.uint16)
        for name, tensor in model.named_parameters()
    }


class _Nothing:
    def take(self) -> None:
        return None


class _Unused:
    async def run(self, sample: Sample, session: Session) -> None:
        raise AssertionError("sessions are driven from outside")
