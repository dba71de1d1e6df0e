"""One contract, every engine: torch, and real SGLang and vLLM servers (servers.py).

Greedy where tokens are compared, since some servers ignore seeds.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from leeway.config import Config, UpdateMode
from leeway.errors import EngineError, InfrastructureError
from leeway.manifests import Canary
from leeway.trajectory import FinishReason, Sampling
from leeway.versions import expand, spans_of
from rollout_service.engines.base import (
    CanaryError,
    ChangedElements,
    Engine,
    GenerateRequest,
    Generation,
)
from rollout_service.engines.choose import open_engine
from rollout_service.engines.constraint import Constraint, ConstraintKind
from rollout_service.engines.server_engine import ServerEngine
from rollout_service.engines.sglang_server import SglangServer
from rollout_service.engines.torch_engine import TorchEngine
from rollout_service.engines.vllm_server import VllmServer
from tests.rollout.servers import (
    KINDS,
    SERVERS,
    VLLM,
    WITHOUT_TOKENIZER,
    connected,
    needs_vllm,
)
from tests.rollout.tiny_models import (
    CONTEXT,
    EOS,
    VOCABULARY,
    plain_logprobs,
    save_tiny_model,
    tokenizer,
    weights_of,
)

SECONDS = 120.0
TOLERANCE = 1e-4
pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]


class Served:
    """An engine, and the model directory whose weights it holds."""

    def __init__(self, kind: str, engine: Engine, models: list[Path]) -> None:
        self.kind = kind
        self.engine = engine
        self.models = models
        self.holds = models[0]

    async def swap(self, number: int, mode: UpdateMode, **more: Any) -> None:
        """To the weights of a model, under the next version."""
        self.holds = self.models[number]
        # Beside what is under way.
        weights = await asyncio.to_thread(weights_of, self.holds)
        await self.engine.swap(weights, self.engine.version + 1, mode, **more)

    async def greedy(self, prompt: list[int], tokens: int = 12) -> Generation:
        (generation,) = await collect(self.engine, [request("greedy", prompt, tokens)])
        return generation

    def check(self, generation: Generation, prompt: list[int]) -> None:
        """The tokens are the plain model's, and so are their log-probabilities."""
        whole = np.concatenate([np.array(prompt), generation.token_ids])
        plain = plain_logprobs(self.holds, whole)[len(prompt) - 1 : -1]
        assert np.array_equal(plain.argmax(-1), generation.token_ids)
        chosen = plain[np.arange(len(plain)), generation.token_ids]
        assert np.abs(chosen - generation.logprobs).max() < TOLERANCE


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["torch", *SERVERS],
)
async def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    directory = tmp_path_factory.mktemp("models")
    # vLLM keeps a packed copy of a tied head on CPUs, which no reload replaces.
    family = "llama_untied" if request.param == "vllm" else "llama"
    models = [save_tiny_model(directory / str(seed), family, seed) for seed in range(3)]
    if request.param == "torch":
        torch = TorchEngine(models[0], concurrency=16)
        yield Served("torch", torch, models)
        await torch.close()
        return
    async with connected(KINDS[request.param], models[0], directory / "server.log") as engine:
        yield Served(request.param, engine, models)


def request(
    name: str, prompt: list[int], tokens: int = 12, temperature: float = 0.0, **more: Any
) -> GenerateRequest:
    sampling = Sampling(temperature=temperature, max_new_tokens=tokens)
    return GenerateRequest(name, np.array(prompt, dtype=np.int32), sampling, 7, **more)


async def collect(engine: Engine, requests: list[GenerateRequest]) -> list[Generation]:
    async with asyncio.timeout(SECONDS):
        return [generation async for generation in engine.generate(requests)]


async def test_ids_log_probabilities_and_versions(served: Served) -> None:
    generation = await served.greedy([5, 6, 9])
    assert generation.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert generation.token_ids.dtype == np.int32
    assert generation.logprobs.dtype == np.float32
    assert set(expand(generation.versions)) == {served.engine.version}
    served.check(generation, [5, 6, 9])


async def test_it_says_how_it_copes(served: Served) -> None:
    seen = []
    async with asyncio.timeout(SECONDS):
        # An answer may be short: until one was caught under way.
        while not any(load.kv_use > 0.0 for load in seen):
            asked = [request(f"load-{i}", [3, 4, 5 + i], 200) for i in range(8)]
            going = asyncio.create_task(collect(served.engine, asked))
            while not going.done():
                seen.append(await served.engine.load())
                await asyncio.sleep(0.002)
            await going
    assert all(0.0 <= load.kv_use <= 1.0 for load in seen)
    assert {load.preemptions for load in seen} == {0}


async def test_log_probabilities_are_after_temperature(served: Served) -> None:
    prompt = [11, 12, 13]
    (generation,) = await collect(served.engine, [request("warm", prompt, 12, temperature=0.7)])
    whole = np.concatenate([np.array(prompt), generation.token_ids])
    plain = plain_logprobs(served.holds, whole, temperature=0.7)[len(prompt) - 1 : -1]
    chosen = plain[np.arange(len(plain)), generation.token_ids]
    assert np.abs(chosen - generation.logprobs).max() < TOLERANCE


@pytest.mark.parametrize("support", [{"top_k": 4}, {"top_p": 0.5}])
async def test_log_probabilities_are_over_the_support_or_refused(
    served: Served, support: dict[str, Any]
) -> None:
    prompt = [14, 15, 16]
    drawn = GenerateRequest(
        "drawn", np.array(prompt, dtype=np.int32), Sampling(1.3, max_new_tokens=12, **support), 7
    )
    if served.kind == "sglang":
        with pytest.raises(EngineError, match=r"use top_p=1\.0 and top_k=0"):
            served.engine.check(drawn)
        return
    (generation,) = await collect(served.engine, [drawn])
    whole = np.concatenate([np.array(prompt), generation.token_ids])
    plain = plain_logprobs(served.holds, whole, temperature=1.3)[len(prompt) - 1 : -1]
    for logprobs, token, said in zip(plain, generation.token_ids, generation.logprobs, strict=True):
        order = np.sort(np.exp(logprobs))[::-1]
        kept = support.get("top_k", int((np.cumsum(order) < 0.5).sum()) + 1)
        assert abs(logprobs[token] - np.log(order[:kept].sum()) - said) < TOLERANCE


async def test_a_seed_determines_the_draws(served: Served) -> None:
    if served.kind == "sglang":
        pytest.skip("SGLang's CPU backend ignores seeds")
    first, second = [
        (await collect(served.engine, [request("drawn", [17, 18], 40, temperature=1.0)]))[0]
        for _ in range(2)
    ]
    assert np.array_equal(first.token_ids, second.token_ids)


async def test_many_at_once_are_each_themselves(served: Served) -> None:
    prompts = {f"many {i}": [3 + i % 5, 8, 20 + i] for i in range(12)}
    generations = await collect(served.engine, [request(n, p) for n, p in prompts.items()])
    assert {g.request_id for g in generations} == set(prompts)
    for generation in generations:
        served.check(generation, prompts[generation.request_id])


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [([], "empty"), ([1] * CONTEXT, "no room"), ([VOCABULARY], "outside the vocabulary")],
)
async def test_what_cannot_be_served_is_refused_before_anything_is_queued(
    served: Served, prompt: list[int], fault: str
) -> None:
    with pytest.raises(EngineError, match=fault):
        served.engine.generate([request("good", [1, 2]), request("bad", prompt)])
    assert served.engine.stats().running == 0


async def test_an_aborted_generation_goes_on_where_it_was(served: Served) -> None:
    prompt = [21, 22, 23]
    whole = await served.greedy(prompt, 200)
    begun = asyncio.Event()
    running = asyncio.create_task(
        collect(served.engine, [request("cut", prompt, 200, on_tokens=lambda _: begun.set())])
    )
    async with asyncio.timeout(SECONDS):
        await begun.wait()
        await served.engine.abort(["cut", "never heard of"])
        (partial,) = await running
    if partial.finish_reason is FinishReason.UNFINISHED:
        resumed = [request("again", prompt, 200, resume=partial)]
        (partial,) = await collect(served.engine, resumed)
    assert np.array_equal(partial.token_ids, whole.token_ids)
    assert np.abs(partial.logprobs - whole.logprobs).max() < TOLERANCE


async def test_tokens_are_told_as_they_come(served: Served) -> None:
    told: list[int] = []
    follow = request("told", [31, 32], 60, on_tokens=lambda ids: told.extend(ids.tolist()))
    (generation,) = await collect(served.engine, [follow])
    assert told == generation.token_ids[: len(told)].tolist()
    assert told


@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_two_updates_in_a_row_under_load(served: Served, mode: UpdateMode) -> None:
    first = served.engine.version
    prompt = [41, 42, 43]
    old = await served.greedy(prompt)
    served.check(old, prompt)
    generations = []
    for number in (1, 2):
        load = [request(f"{number}/{i}", [50 + i, 4], 220) for i in range(4)]
        running = asyncio.create_task(collect(served.engine, load))
        await _running(served.engine)
        await served.swap(number, mode)
        assert served.engine.version == first + number
        # A cached prefix of the old weights would show here.
        served.check(await served.greedy(prompt), prompt)
        generations += await running
    for generation in generations:
        versions = expand(generation.versions)
        assert versions.size == generation.token_ids.size == generation.logprobs.size
        assert (np.diff(versions) >= 0).all()
        assert first <= versions.min() and versions.max() <= first + 2
    await served.swap(0, mode)


async def test_who_comes_while_an_update_drains_waits_for_it(served: Served) -> None:
    first = served.engine.version
    begun = asyncio.Event()
    old = request("old", [44, 45], 220, on_tokens=lambda _: begun.set())
    running = [asyncio.create_task(collect(served.engine, [old]))]
    async with asyncio.timeout(SECONDS):
        await begun.wait()
        draining = asyncio.create_task(served.swap(1, UpdateMode.DRAIN))
        while not draining.done():
            new = request(f"new {len(running)}", [46, len(running)])
            running.append(asyncio.create_task(collect(served.engine, [new])))
            await asyncio.wait({draining}, timeout=0.05)
        await draining
    for generation in [generation for task in running for generation in await task]:
        (version,) = set(expand(generation.versions))
        assert version == first or generation.request_id != "old"
        assert version in (first, first + 1)
    served.check(await served.greedy([46, 47]), [46, 47])
    await served.swap(0, UpdateMode.DRAIN)


HELD_TO = {
    ConstraintKind.JSON_SCHEMA: (
        json.dumps(
            {
                "type": "object",
                "properties": {"ok": {"type": "boolean"}},
                "required": ["ok"],
                "additionalProperties": False,
            }
        ),
        r'\{"ok":(true|false)\}',
    ),
    ConstraintKind.REGEX: ("[0-9]{3}-[a-f]{2}", "[0-9]{3}-[a-f]{2}"),
    ConstraintKind.GRAMMAR: ('root ::= "yes" | "no"', "yes|no"),
}


def held(kind: ConstraintKind, text: str, name: str = "held", **more: Any) -> GenerateRequest:
    constraint = Constraint(kind, text, "response_format")
    return request(name, [5, 6, 9], 240, temperature=1.0, constraint=constraint, **more)


def said(generation: Generation) -> str:
    return str(tokenizer().decode(generation.token_ids, skip_special_tokens=True))


@pytest.mark.parametrize("on_tokens", [None, lambda ids: None], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", list(ConstraintKind))
async def test_a_constraint_is_followed_or_refused(
    served: Served, kind: ConstraintKind, on_tokens: Any
) -> None:
    text, pattern = HELD_TO[kind]
    asked = held(kind, text, on_tokens=on_tokens)
    if served.kind == "torch":
        with pytest.raises(EngineError, match=r"response_format = .*kind sglang or vllm"):
            served.engine.check(asked)
        return
    free = request("free", [5, 6, 9])
    generations = {g.request_id: g for g in await collect(served.engine, [asked, free])}
    served.check(generations["free"], [5, 6, 9])
    generation = generations["held"]
    assert re.fullmatch(pattern, said(generation)), said(generation)
    assert generation.finish_reason is FinishReason.STOP
    # What is left is likelier than under the policy: no ratio can be made of it.
    whole = np.concatenate([np.array([5, 6, 9]), generation.token_ids])
    plain = plain_logprobs(served.holds, whole)[2:-1]
    gain = generation.logprobs - plain[np.arange(len(plain)), generation.token_ids]
    assert gain.min() > -TOLERANCE
    assert gain.max() > 0.1


@pytest.mark.parametrize("on_tokens", [None, lambda ids: None], ids=["whole", "streamed"])
async def test_a_constraint_that_cannot_be_read_is_refused_and_harms_nobody(
    served: Served, on_tokens: Any
) -> None:
    with pytest.raises(EngineError):
        await collect(
            served.engine, [held(ConstraintKind.GRAMMAR, "root ::= (", on_tokens=on_tokens)]
        )
    served.check(await served.greedy([5, 6, 9]), [5, 6, 9])


async def test_a_constrained_answer_is_never_resumed(served: Served) -> None:
    partial = Generation(
        "held",
        np.array([30], dtype=np.int32),
        np.array([-1.0], dtype=np.float32),
        spans_of([served.engine.version]),
        FinishReason.UNFINISHED,
        0.0,
    )
    with pytest.raises(EngineError, match="response_format = "):
        served.engine.check(held(ConstraintKind.REGEX, "[0-9]+", resume=partial))


@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_a_constraint_outlives_an_update(served: Served, mode: UpdateMode) -> None:
    if served.kind == "torch":
        pytest.skip("it takes no constraint")
    first = served.engine.version
    begun = asyncio.Event()

    def ask(number: int) -> asyncio.Task[list[Generation]]:
        digits, tell = "[0-9]{200}", lambda _: begun.set()
        asked = held(ConstraintKind.REGEX, digits, name=f"held {number}", on_tokens=tell)
        return asyncio.create_task(collect(served.engine, [asked]))

    running = [ask(0)]
    async with asyncio.timeout(SECONDS):
        await begun.wait()
        swapping = asyncio.create_task(served.swap(1, mode))
        # Whenever it takes place, an answer is under way.
        while not swapping.done():
            running.append(ask(len(running)))
            await asyncio.wait({swapping}, timeout=0.05)
        await swapping
    generations = [generation for task in running for generation in await task]
    seen = [set(expand(generation.versions).tolist()) for generation in generations]
    assert all(versions <= {first, first + 1} for versions in seen)
    given_up = [g for g in generations if g.finish_reason is FinishReason.UNFINISHED]
    for generation in generations:
        # SGLang gives up some by itself; what they have said follows the constraint.
        pattern = "[0-9]{1,200}" if generation in given_up else "[0-9]{200}"
        assert re.fullmatch(pattern, said(generation)), said(generation)
    assert served.kind == "sglang" or not given_up
    if mode is UpdateMode.DRAIN:
        assert seen[0] == {first} and all(len(versions) == 1 for versions in seen)
    else:
        assert given_up or {first, first + 1} in seen
    await served.swap(0, mode)


async def test_changed_elements_are_as_good_as_whole_tensors(served: Served) -> None:
    target = weights_of(served.models[1])
    updates = {}
    for name, new in target.items():
        old = weights_of(served.holds)[name]
        positions = np.flatnonzero(old.reshape(-1) != new.reshape(-1))
        updates[name] = ChangedElements(positions, new.reshape(-1)[positions])
    served.holds = served.models[1]
    await served.engine.swap(updates, served.engine.version + 1, UpdateMode.IN_PLACE)
    served.check(await served.greedy([61, 62]), [61, 62])
    await served.swap(0, UpdateMode.IN_PLACE)


async def test_a_canary_that_agrees_and_one_that_does_not(served: Served) -> None:
    ids = np.array([5, 9, 17, 33], dtype=np.int32)
    plain = plain_logprobs(served.models[1], ids)[:-1]
    expected = plain[np.arange(3), ids[1:]].astype(np.float32)
    await served.swap(1, UpdateMode.RECOMPUTE, canary=Canary(ids, expected, 1e-3))
    served.check(await served.greedy([71, 72]), [71, 72])
    # The last test of this engine: after it, nothing is served any more.
    with pytest.raises(CanaryError):
        await served.swap(2, UpdateMode.RECOMPUTE, canary=Canary(ids, expected, 1e-3))
    with pytest.raises(EngineError):
        await served.greedy([71, 72])


async def _running(engine: Engine) -> None:
    async with asyncio.timeout(SECONDS):
        while engine.stats().running == 0:
            await asyncio.sleep(0.005)


async def test_a_server_that_is_away_is_no_engine(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path)
    away = "http://127.0.0.1:9"
    for server in (SglangServer(away), VllmServer(away, [EOS])):
        engine = ServerEngine(server, model, CONTEXT, VOCABULARY, 0)
        with pytest.raises(InfrastructureError):
            await collect(engine, [request("away", [1, 2])])
        await engine.close()


@needs_vllm
async def test_vllm_with_log_probabilities_before_temperature_is_refused(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        async with connected(VLLM, model, tmp_path / "server.log"):
            pass


@pytest.mark.parametrize("kind", SERVERS)
async def test_a_server_without_a_tokenizer_takes_no_constraint(kind: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    command = KINDS[kind] + WITHOUT_TOKENIZER
    async with connected(command, model, tmp_path / "server.log") as engine:
        with pytest.raises(EngineError, match="without --skip-tokenizer-init"):
            engine.check(held(ConstraintKind.REGEX, "[0-9]+"))
        (generation,) = await collect(engine, [request("free", [5, 6, 9])])
    assert generation.token_ids.size > 0


async def test_a_server_that_ends_while_it_starts_is_said_with_its_log(tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "run": {"directory": str(tmp_path)},
            "model": {"path": "unused"},
            "task": {"jsonl": "unused", "reward": "un:used"},
            "rollout": {"engine": {"kind": "sglang", "command": ["sh", "-c", "exit 3"]}},
        }
    )
    with pytest.raises(InfrastructureError, match=r"status 3 .*engine-node\.log"):
        async with open_engine(config, tmp_path, "node"):
            pass
