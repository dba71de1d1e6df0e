"""The torch engine's promises: exact numbers, versions, updates in flight, failures."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from leeway.config import UpdateMode
from leeway.errors import EngineError, InfrastructureError
from leeway.manifests import Canary
from leeway.trajectory import FinishReason, Sampling
from leeway.versions import VersionSpan, expand
from rollout_service.engines.base import (
    CanaryError,
    ChangedElements,
    Engine,
    GenerateRequest,
    Generation,
)
from rollout_service.engines.torch_engine import TorchEngine
from tests.rollout.tiny_models import (
    CONFIGS,
    CONTEXT,
    EOS,
    VOCABULARY,
    plain_logprobs,
    save_tiny_model,
    weights_of,
)
from tests.waiting import eventually

SECONDS = 60.0
NEVER_STOPS: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@asynccontextmanager
async def engine_of(
    directory: Path, concurrency: int = 8, **options: Any
) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(directory, concurrency=concurrency, **options)
    try:
        yield engine
    finally:
        await engine.close()


def scores(engine: TorchEngine, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """What an idle engine's model says of the tokens."""
    return engine._model.logprobs(tokens.astype(np.int64))


def prompt(seed: int, length: int = 9) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(8, VOCABULARY, length).astype(np.int32)


def request(name: str, **changes: Any) -> GenerateRequest:
    plain = GenerateRequest(
        request_id=name,
        prompt=prompt(0),
        sampling=Sampling(max_new_tokens=24),
        seed=int.from_bytes(name.encode()),
    )
    return replace(plain, **changes)


async def collect(stream: AsyncIterator[Generation]) -> dict[str, Generation]:
    async with asyncio.timeout(SECONDS):
        return {generation.request_id: generation async for generation in stream}


async def until(condition: Callable[[], bool]) -> None:
    """An engine is at work in another thread, and quick: it is looked at all the time."""
    await eventually(condition, "what the engine does", SECONDS, every=0.001)


def tokens_of(generations: dict[str, Generation]) -> dict[str, list[int]]:
    return {name: g.token_ids.tolist() for name, g in sorted(generations.items())}


def assert_same_bits(a: dict[str, Generation], b: dict[str, Generation]) -> None:
    assert tokens_of(a) == tokens_of(b)
    for name, generation in a.items():
        np.testing.assert_array_equal(generation.logprobs, b[name].logprobs)


def mixed_requests() -> list[GenerateRequest]:
    """Groups and singles, several temperatures and lengths: more than run at once."""
    requests = [request(f"group{i}", sampling=Sampling(max_new_tokens=5 + 7 * i)) for i in range(4)]
    for i, temperature in enumerate((0.0, 0.7, 1.0, 1.3)):
        sampling = Sampling(temperature=temperature, max_new_tokens=10 + 5 * i)
        requests.append(request(f"t{i}", prompt=prompt(i + 1, 3 + 11 * i), sampling=sampling))
    return requests


# Numbers.


@pytest.mark.parametrize("family", CONFIGS)
async def test_log_probabilities_match_plain_transformers(family: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family)
    requests = mixed_requests()
    async with engine_of(tmp_path, concurrency=3) as engine:
        generations = await collect(engine.generate(requests))
    assert len(generations) == len(requests)
    for asked in requests:
        got = generations[asked.request_id]
        everything = np.concatenate([asked.prompt, got.token_ids])
        temperature = asked.sampling.temperature or 1.0
        plain = plain_logprobs(tmp_path, everything, temperature)[asked.prompt.size - 1 : -1]
        np.testing.assert_allclose(
            got.logprobs, plain[np.arange(got.token_ids.size), got.token_ids], atol=1e-4
        )
        if asked.sampling.temperature == 0.0:
            assert got.token_ids.tolist() == plain.argmax(-1).tolist()


async def test_canary_log_probabilities_match_plain_transformers(llama: Path) -> None:
    tokens = prompt(3, 40)
    async with engine_of(llama) as engine:
        got = scores(engine, tokens)
    plain = plain_logprobs(llama, tokens)
    np.testing.assert_allclose(got, plain[np.arange(39), tokens[1:]], atol=1e-4)
    assert got.dtype == np.float32


async def test_tokens_do_not_depend_on_the_batch(llama: Path) -> None:
    requests = mixed_requests()
    async with engine_of(llama, concurrency=8) as engine:
        together = await collect(engine.generate(requests))
        alone: dict[str, Generation] = {}
        for asked in requests:
            alone |= await collect(engine.generate([asked]))
    assert tokens_of(alone) == tokens_of(together)


async def test_an_idle_engine_repeats_itself_bit_for_bit(llama: Path) -> None:
    requests = mixed_requests()
    async with engine_of(llama, concurrency=3) as engine:
        first = await collect(engine.generate(requests))
        # What ran in between leaves no trace.
        await collect(engine.generate([request("long", sampling=Sampling(max_new_tokens=200))]))
        again = await collect(engine.generate(requests))
    async with engine_of(llama, concurrency=3) as fresh:
        afresh = await collect(fresh.generate(requests))
    assert_same_bits(first, again)
    assert_same_bits(first, afresh)


async def test_answers_longer_than_a_growth_of_the_cache(llama: Path) -> None:
    asked = request("long", sampling=Sampling(max_new_tokens=CONTEXT))
    short = request("short", prompt=prompt(5), sampling=Sampling(max_new_tokens=2))
    async with engine_of(llama, stop_tokens=NEVER_STOPS) as engine:
        got = (await collect(engine.generate([asked, short])))["long"]
    assert got.finish_reason is FinishReason.LENGTH
    everything = np.concatenate([asked.prompt, got.token_ids])
    assert everything.size == CONTEXT
    plain = plain_logprobs(llama, everything)[asked.prompt.size - 1 : -1]
    np.testing.assert_allclose(
        got.logprobs, plain[np.arange(got.token_ids.size), got.token_ids], atol=1e-4
    )


# Stop rules and validation.


async def test_the_stop_token_ends_an_answer_and_is_part_of_it(llama: Path) -> None:
    requests = [request(f"r{i}", sampling=Sampling(max_new_tokens=200)) for i in range(24)]
    async with engine_of(llama, stop_tokens=range(0, VOCABULARY, 15)) as engine:
        generations = await collect(engine.generate(requests))
    stopped = [g for g in generations.values() if g.finish_reason is FinishReason.STOP]
    assert stopped
    for generation in generations.values():
        at = [i for i, token in enumerate(generation.token_ids) if token % 15 == 0]
        assert at == ([generation.token_ids.size - 1] if generation in stopped else [])


async def test_stop_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{EOS}, 11]}}')
    async with engine_of(tmp_path) as engine:
        requests = [request(f"r{i}", sampling=Sampling(max_new_tokens=200)) for i in range(32)]
        generations = await collect(engine.generate(requests))
    last = {g.token_ids[-1] for g in generations.values() if g.finish_reason is FinishReason.STOP}
    assert last == {EOS, 11}


async def test_requests_that_cannot_be_served_are_refused_before_queueing(llama: Path) -> None:
    async with engine_of(llama, context=32) as engine:
        bad = {
            "prompt of 33 tokens is longer than the context of 32": prompt(0, 33),
            "leaves no room in the context of 32": prompt(0, 32),
            f"id {VOCABULARY}, outside the vocabulary of {VOCABULARY}": np.array([VOCABULARY]),
            "id -1, outside the vocabulary": np.array([3, -1]),
            "prompt is empty": np.array([]),
        }
        for message, ids in bad.items():
            with pytest.raises(EngineError, match=message):
                engine.generate([request("fine"), request("bad", prompt=ids.astype(np.int32))])
        with pytest.raises(EngineError, match="unique"):
            engine.generate([request("twice"), request("twice")])
        canary = Canary(prompt(0, 33), np.zeros(32, np.float32), 1.0)
        with pytest.raises(EngineError, match="longer than the context"):
            await engine.swap({}, 1, UpdateMode.IN_PLACE, canary)
        assert engine.stats().waiting == engine.stats().tokens_prefilled == 0
        fits = await collect(engine.generate([request("fits", prompt=prompt(0, 31))]))
        assert fits["fits"].token_ids.size == 1


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not a Hugging Face causal LM"):
        TorchEngine(tmp_path, concurrency=1)


async def test_a_context_beyond_the_models_is_refused(llama: Path) -> None:
    with pytest.raises(EngineError, match=r"model\.context = 999: the model allows at most 256"):
        TorchEngine(llama, concurrency=1, context=999)


# Admission and sharing.


async def test_equal_prompts_share_one_prefill(llama: Path) -> None:
    group = [request(f"r{i}", prompt=prompt(0, 50)) for i in range(8)]
    async with engine_of(llama, concurrency=8) as engine:
        together = await collect(engine.generate(group))
        assert engine.stats().tokens_prefilled == 50
    # Later members take the prefix over from a slot, even when only one runs at a time.
    for concurrency in (1, 3):
        async with engine_of(llama, concurrency=concurrency) as engine:
            assert tokens_of(await collect(engine.generate(group))) == tokens_of(together)
            assert engine.stats().tokens_prefilled == 50


async def test_prompts_that_begin_alike_share_their_beginning(llama: Path) -> None:
    system = prompt(0, 40)
    asked = [
        request(f"r{i}", prompt=np.concatenate([system, prompt(i + 1, 5 + i)])) for i in range(6)
    ]
    # One that is all prefix, and one that parts from it too early to share.
    asked += [request("same", prompt=system), request("early", prompt=prompt(0, 50)[3:])]
    async with engine_of(llama) as engine:
        got = await collect(engine.generate(asked))
        assert engine.stats().tokens_prefilled == 40 + sum(5 + i for i in range(6)) + 1 + 47
    for one in asked:
        tokens, logprobs = got[one.request_id].token_ids, got[one.request_id].logprobs
        plain = plain_logprobs(llama, np.concatenate([one.prompt, tokens]))
        plain = plain[one.prompt.size - 1 : -1]
        np.testing.assert_allclose(logprobs, plain[np.arange(tokens.size), tokens], atol=1e-4)


async def test_a_new_request_never_gets_a_beginning_of_older_weights(
    llama: Path, other: Path
) -> None:
    system = prompt(0, 40)
    old = request("old", prompt=system, sampling=Sampling(max_new_tokens=200))
    new = request("new", prompt=np.concatenate([system, prompt(1, 4)]))
    async with engine_of(llama, stop_tokens=NEVER_STOPS) as engine:
        running = asyncio.create_task(collect(engine.generate([old])))
        await until(lambda: engine.stats().tokens_generated > 3)
        await engine.swap(weights_of(other), 1, UpdateMode.IN_PLACE)
        got = (await collect(engine.generate([new])))["new"]
        await engine.abort(["old"])
        await running
    plain = plain_logprobs(other, np.concatenate([new.prompt, got.token_ids]))[43:-1]
    np.testing.assert_allclose(
        got.logprobs, plain[np.arange(got.token_ids.size), got.token_ids], atol=1e-4
    )


async def test_a_latecomer_copies_the_prefix_of_a_sequence_that_runs(llama: Path) -> None:
    shared = prompt(0, 40)
    requests = [
        request("runs", prompt=shared, sampling=Sampling(max_new_tokens=100)),
        request("ends", prompt=prompt(1, 60), sampling=Sampling(max_new_tokens=5)),
        request("late", prompt=shared, sampling=Sampling(max_new_tokens=30)),
    ]
    async with engine_of(llama, concurrency=2, stop_tokens=NEVER_STOPS) as engine:
        got = (await collect(engine.generate(requests)))["late"]
        assert engine.stats().tokens_prefilled == 40 + 60
    plain = plain_logprobs(llama, np.concatenate([shared, got.token_ids]))[39:-1]
    np.testing.assert_allclose(got.logprobs, plain[np.arange(30), got.token_ids], atol=1e-4)


async def test_no_more_than_the_concurrency_run_and_the_first_come_first(llama: Path) -> None:
    requests = [
        request(f"r{i}", prompt=prompt(i), sampling=Sampling(max_new_tokens=4)) for i in range(7)
    ]
    async with engine_of(llama, concurrency=2, stop_tokens=NEVER_STOPS) as engine:
        order = [generation.request_id async for generation in engine.generate(requests)]
    assert order == [f"r{i}" for i in range(7)]


async def test_what_does_not_fit_waits_and_the_load_says_so(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        request(f"r{i}", prompt=prompt(i), sampling=Sampling(max_new_tokens=length))
        for i, length in enumerate((2, 60, 60, 60, 60))
    ]
    async with engine_of(llama, concurrency=2, stop_tokens=NEVER_STOPS) as engine:
        forward, steps = engine._model.forward, itertools.count()
        holding, looked = threading.Event(), threading.Event()

        def held(*arguments: Any) -> Any:
            """The first ends with the second step; the third is held."""
            if next(steps) == 2:
                holding.set()
                looked.wait(30)
            return forward(*arguments)

        monkeypatch.setattr(engine._model, "forward", held)
        answers = engine.generate(requests)
        await anext(answers)
        # In between the others are neither waiting nor running.
        assert await asyncio.to_thread(holding.wait, 30)
        load = await engine.load()
        assert 0 < load.waiting <= 3 and 0.0 < load.kv_use <= 1.0
        looked.set()
        assert len([generation async for generation in answers]) == 4
        idle = await engine.load()
        assert (idle.kv_use, idle.waiting, idle.preemptions) == (0.0, 0, 0)


async def test_a_deterministic_engine_samples_the_same_bits_whoever_shares_its_steps(
    llama: Path,
) -> None:
    def of(index: int) -> GenerateRequest:
        own = prompt(index // 3, length=5 + 12 * (index // 3))
        return request(f"r{index}", prompt=own, sampling=Sampling(max_new_tokens=20))

    everything = [of(index) for index in range(9)]
    orders = [[everything], [[one] for one in everything], [everything[:7], everything[7:]]]
    orders += [[[one] for one in reversed(everything)]]
    seen = []
    for concurrency, parts in zip((9, 1, 5, 2), orders, strict=True):
        options = {"stop_tokens": NEVER_STOPS, "deterministic": True}
        async with engine_of(llama, concurrency=concurrency, **options) as engine:
            answers = [await collect(engine.generate(part)) for part in parts]
        seen.append({name: answer for part in answers for name, answer in part.items()})
    for other_order in seen[1:]:
        for name, answer in seen[0].items():
            assert np.array_equal(answer.token_ids, other_order[name].token_ids)
            assert np.array_equal(answer.logprobs, other_order[name].logprobs)


async def test_progress_counts_the_tokens_of_what_has_not_ended(llama: Path) -> None:
    async with engine_of(llama, stop_tokens=NEVER_STOPS) as engine:
        names = ["long", "short"]
        requests = [
            request(name, sampling=Sampling(max_new_tokens=count))
            for name, count in (("long", 60), ("short", 2))
        ]
        seen = [
            (generation.request_id, engine.progress(names))
            async for generation in engine.generate(requests)
        ]
    assert [name for name, _ in seen] == ["short", "long"]
    assert 2 <= seen[0][1] <= 60 and seen[1][1] == 0


async def test_a_long_prefill_is_split_over_steps(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_service.engines.scheduler.PREFILL_TOKENS", 25)
    requests = mixed_requests()
    async with engine_of(llama) as engine:
        split = await collect(engine.generate(requests))
    monkeypatch.undo()
    async with engine_of(llama) as engine:
        assert tokens_of(await collect(engine.generate(requests))) == tokens_of(split)


# Updates in flight.


async def interrupted(
    engine: Engine,
    requests: Iterable[GenerateRequest],
    weights: Iterable[dict[str, npt.NDArray[Any]]],
    mode: UpdateMode,
) -> dict[str, Generation]:
    """Generates, and swaps as soon as some more tokens have been generated."""
    running = asyncio.create_task(collect(engine.generate(list(requests))))
    for update in weights:
        enough = engine.stats().tokens_generated + 8

        def ready(enough: int = enough) -> bool:
            return engine.stats().tokens_generated >= enough or running.done()

        await until(ready)
        assert await engine.swap(update, engine.version + 1, mode) >= 0.0
    return await running


@pytest.mark.parametrize("mode", UpdateMode)
async def test_swapping_unchanged_weights_changes_no_token(llama: Path, mode: UpdateMode) -> None:
    requests = mixed_requests()
    requests = [replace(r, sampling=replace(r.sampling, max_new_tokens=60)) for r in requests]
    async with engine_of(llama, concurrency=4) as engine:
        plain = await collect(engine.generate(requests))
        swapped = await interrupted(engine, requests, [weights_of(llama)] * 3, mode)
        assert engine.version == 3
        assert engine.stats().pauses == 3
    assert tokens_of(swapped) == tokens_of(plain)
    for name, generation in swapped.items():
        assert generation.finish_reason is plain[name].finish_reason
        np.testing.assert_allclose(generation.logprobs, plain[name].logprobs, atol=1e-5)


@pytest.mark.parametrize("mode", UpdateMode)
async def test_every_token_carries_the_version_whose_weights_computed_it(
    llama: Path, other: Path, mode: UpdateMode
) -> None:
    """Two real swaps in a row. Except in place, where the cache is of both, the numbers tell."""
    requests = [
        request(f"r{i}", prompt=prompt(i), sampling=Sampling(max_new_tokens=60)) for i in range(6)
    ]
    directories = [llama, other, llama]
    async with engine_of(llama, concurrency=4, stop_tokens=NEVER_STOPS) as engine:
        updates = [weights_of(other), weights_of(llama)]
        generations = await interrupted(engine, requests, updates, mode)
    versions = {v for g in generations.values() for v, _ in g.versions}
    assert versions == {0, 1, 2} if mode is not UpdateMode.DRAIN else versions >= {0}
    for asked in requests:
        got = generations[asked.request_id]
        stamped = expand(got.versions)
        assert stamped.size == got.token_ids.size == 60
        assert (np.diff(stamped) >= 0).all()
        if mode is UpdateMode.DRAIN:
            assert len(got.versions) == 1
        if mode is UpdateMode.IN_PLACE:
            continue
        everything = np.concatenate([asked.prompt, got.token_ids])
        for version, directory in enumerate(directories):
            mine = stamped == version
            plain = plain_logprobs(directory, everything)[asked.prompt.size - 1 : -1]
            np.testing.assert_allclose(
                got.logprobs[mine], plain[np.arange(60), got.token_ids][mine], atol=1e-4
            )


async def test_in_place_keeps_the_cache_and_recompute_does_not(llama: Path, other: Path) -> None:
    requests = [
        request(f"r{i}", prompt=prompt(i), sampling=Sampling(max_new_tokens=40)) for i in range(4)
    ]
    prefilled = {}
    for mode in UpdateMode:
        async with engine_of(llama, stop_tokens=NEVER_STOPS) as engine:
            await interrupted(engine, requests, [weights_of(other)], mode)
            prefilled[mode] = engine.stats().tokens_prefilled
    prompts = sum(r.prompt.size for r in requests)
    assert prefilled[UpdateMode.IN_PLACE] == prefilled[UpdateMode.DRAIN] == prompts
    assert prefilled[UpdateMode.RECOMPUTE] > 2 * prompts


async def test_draining_holds_back_what_waits(llama: Path, other: Path) -> None:
    requests = [
        request(f"r{i}", prompt=prompt(i), sampling=Sampling(max_new_tokens=20)) for i in range(6)
    ]
    async with engine_of(llama, concurrency=2, stop_tokens=NEVER_STOPS) as engine:
        running = asyncio.create_task(collect(engine.generate(requests)))
        await until(lambda: engine.stats().running == 2)
        await engine.swap(weights_of(other), 1, UpdateMode.DRAIN)
        generations = await running
    assert generations["r0"].versions == generations["r1"].versions == (VersionSpan(0, 20),)
    assert generations["r5"].versions == (VersionSpan(1, 20),)


@pytest.mark.parametrize("mode", [UpdateMode.IN_PLACE, UpdateMode.RECOMPUTE])
async def test_a_new_request_never_gets_a_prefix_of_older_weights(
    llama: Path, other: Path, mode: UpdateMode
) -> None:
    shared = prompt(0, 30)
    old = request("old", prompt=shared, sampling=Sampling(max_new_tokens=200))
    new = request("new", prompt=shared)
    async with engine_of(llama, stop_tokens=NEVER_STOPS) as engine:
        running = asyncio.create_task(collect(engine.generate([old])))
        await until(lambda: engine.stats().tokens_generated > 3)
        # The same version number again: it is the weights that count.
        await engine.swap(weights_of(other), 0, mode)
        got = (await collect(engine.generate([new])))["new"]
        await engine.abort(["old"])
        await running
    plain = plain_logprobs(other, np.concatenate([shared, got.token_ids]))[29:-1]
    np.testing.assert_allclose(
        got.logprobs, plain[np.arange(got.token_ids.size), got.token_ids], atol=1e-4
    )


async def test_changed_tensors_and_changed_elements_give_the_new_model(
    llama: Path, other: Path
) -> None:
    tokens = prompt(4, 30)
    old, new = weights_of(llama), weights_of(other)
    elements = {}
    for name, values in new.items():
        changed = np.flatnonzero(values.ravel() != old[name].ravel())
        elements[name] = ChangedElements(changed, values.ravel()[changed])
    rounded_away = {
        name: (values.astype(np.uint32) << 16 | 0x7FFF).view(np.float32)
        for name, values in new.items()
    }
    async with engine_of(other) as engine:
        expected = scores(engine, tokens)
    for update in (new, elements, rounded_away):
        async with engine_of(llama) as engine:
            await engine.swap(update, 5, UpdateMode.IN_PLACE)
            assert engine.version == 5
            np.testing.assert_array_equal(scores(engine, tokens), expected)


async def test_an_update_that_does_not_fit_changes_nothing(llama: Path, other: Path) -> None:
    tokens = prompt(4, 30)
    update = weights_of(other)
    name = "model.layers.1.mlp.up_proj.weight"
    faults: list[tuple[str, dict[str, Any]]] = [
        ("no such tensor", {"model.layers.9.mlp.up_proj.weight": update[name]}),
        ("shape", {name: update[name][1:]}),
        ("dtype int64", {name: update[name].astype(np.int64)}),
        ("outside", {name: ChangedElements(np.array([64 * 96]), np.zeros(1, np.uint16))}),
        ("positions", {name: ChangedElements(np.array([1, 2]), np.zeros(1, np.uint16))}),
    ]
    async with engine_of(llama) as engine:
        before = scores(engine, tokens)
        for message, fault in faults:
            with pytest.raises(EngineError, match=message):
                await engine.swap(update | fault, 1, UpdateMode.IN_PLACE)
        assert engine.version == 0
        np.testing.assert_array_equal(scores(engine, tokens), before)


# The canary.


def canary_of(directory: Path, tolerance: float = 1e-4) -> Canary:
    tokens = prompt(7, 12)
    plain = plain_logprobs(directory, tokens)[np.arange(11), tokens[1:]]
    return Canary(tokens, plain, tolerance)


@pytest.mark.parametrize("mode", UpdateMode)
async def test_a_canary_that_agrees_changes_nothing(llama: Path, mode: UpdateMode) -> None:
    requests = [replace(r, sampling=Sampling(max_new_tokens=60)) for r in mixed_requests()]
    async with engine_of(llama, concurrency=4) as engine:
        plain = await collect(engine.generate(requests))
        running = asyncio.create_task(collect(engine.generate(requests)))
        for version in range(1, 4):
            await engine.swap({}, version, mode, canary_of(llama))
        assert tokens_of(await running) == tokens_of(plain)
        assert engine.stats().pauses == 3
        await engine.swap({}, 4, mode, canary_of(llama))


@pytest.mark.parametrize("mode", UpdateMode)
@pytest.mark.parametrize("idle", [True, False])
async def test_nothing_sampled_under_wrong_weights_leaves_the_engine(
    llama: Path, other: Path, mode: UpdateMode, idle: bool
) -> None:
    """One tensor does not arrive: of all that runs, only what had ended before is yielded."""
    update = weights_of(other)
    del update["model.layers.1.mlp.up_proj.weight"]
    requests = [
        request(f"r{i}", prompt=prompt(i), sampling=Sampling(max_new_tokens=48 if i else 8))
        for i in range(6)
    ]
    ended: list[Generation] = []
    async with engine_of(llama, concurrency=4, stop_tokens=NEVER_STOPS) as engine:

        async def generate() -> None:
            async for generation in engine.generate(requests):
                ended.append(generation)  # noqa: PERF401 - what was yielded before it fails

        running = asyncio.create_task(generate())
        await until(lambda: len(ended) > (5 if idle else 0))
        with pytest.raises(CanaryError, match="version 1"):
            await engine.swap(update, 1, mode, canary_of(other))
        if not idle:
            with pytest.raises(CanaryError):
                await running
        with pytest.raises(CanaryError):
            engine.generate(requests)
    assert {version for g in ended for version, _ in g.versions} == {0}


# Adapters.


async def test_adapters_are_applied_as_peft_applies_them(llama: Path) -> None:
    """Against plain transformers with the product added to the layer in float32."""
    random = np.random.default_rng(0)
    name, rank = "model.layers.1.self_attn.q_proj", 3
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    layer = model.get_submodule(name)
    original = layer.weight.detach().clone()
    tokens = prompt(4, 30)

    def factors(scale: float) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        a = random.normal(0, scale, (rank, layer.in_features)).astype(np.float32)
        return a, random.normal(0, scale, (layer.out_features, rank)).astype(np.float32)

    def expected(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> Canary:
        with torch.inference_mode():
            layer.weight.data = original + torch.from_numpy(b @ a)
            logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
        plain = logits.log_softmax(-1).numpy()
        return Canary(tokens, plain[np.arange(29), tokens[1:]], 1e-4)

    async with engine_of(llama) as engine:
        first, second = factors(0.5), factors(0.5)
        names = [f"base_model.model.{name}.lora_{factor}.weight" for factor in "AB"]
        for version, pair in enumerate((first, second), 1):
            update = dict(zip(names, pair, strict=True))
            await engine.swap(update, version, UpdateMode.IN_PLACE, expected(*pair))
        # Only some elements of one factor.
        b = second[1].copy()
        b.flat[[2, 5]] = 1.0
        elements = ChangedElements(np.array([2, 5]), np.ones(2, np.float32))
        await engine.swap({names[1]: elements}, 3, UpdateMode.IN_PLACE, expected(second[0], b))
        for message, fault in {
            "no linear layer": {"model.norm.lora_A.weight": first[0]},
            "of one rank": {names[0]: first[0][:2]},
            "shape": {names[0]: first[0][:, 1:]},
        }.items():
            with pytest.raises(EngineError, match=message):
                await engine.swap(fault, 4, UpdateMode.IN_PLACE)


# Abort and resume.


async def test_an_aborted_generation_is_continued_elsewhere_as_if_nothing_had_been(
    llama: Path,
) -> None:
    requests = [replace(r, sampling=Sampling(max_new_tokens=50)) for r in mixed_requests()]
    async with engine_of(llama, concurrency=5) as engine:
        whole = await collect(engine.generate(requests))
        running = asyncio.create_task(collect(engine.generate(requests)))
        before = engine.stats().tokens_generated
        await until(lambda: engine.stats().tokens_generated >= before + 30)
        await engine.abort([*(r.request_id for r in requests), "unknown"])
        partial = await running
        assert engine.stats().running == engine.stats().waiting == 0
    assert any(0 < g.token_ids.size < 50 for g in partial.values())
    unfinished = [
        replace(r, resume=partial[r.request_id])
        for r in requests
        if partial[r.request_id].finish_reason is FinishReason.UNFINISHED
    ]
    assert unfinished
    async with engine_of(llama, concurrency=8, version=4) as elsewhere:
        resumed = await collect(elsewhere.generate(unfinished))
    for name, generation in resumed.items():
        n = partial[name].token_ids.size
        assert generation.token_ids.tolist() == whole[name].token_ids.tolist()
        assert generation.finish_reason is whole[name].finish_reason
        np.testing.assert_array_equal(generation.logprobs[:n], partial[name].logprobs)
        np.testing.assert_allclose(generation.logprobs, whole[name].logprobs, atol=1e-5)
        stamped = expand(generation.versions)
        assert (stamped[:n] == 0).all()
        assert (stamped[n:] == 4).all()
        assert generation.seconds >= partial[name].seconds


async def test_a_partial_that_is_already_long_enough_ends_at_once(llama: Path) -> None:
    partial = Generation(
        "r", prompt(9, 24), np.zeros(24, np.float32), (VersionSpan(0, 24),),
        FinishReason.UNFINISHED, 1.0,
    )  # fmt: skip
    async with engine_of(llama) as engine:
        got = (await collect(engine.generate([request("r", resume=partial)])))["r"]
        with pytest.raises(EngineError, match="resume has ended"):
            engine.generate([request("r", resume=got)])
    assert got.finish_reason is FinishReason.LENGTH
    assert got.token_ids.tolist() == partial.token_ids.tolist()


async def test_leaving_the_iterator_aborts_the_rest(llama: Path) -> None:
    requests = [
        request("short", sampling=Sampling(max_new_tokens=2)),
        request("long", sampling=Sampling(max_new_tokens=240)),
    ]
    async with engine_of(llama, stop_tokens=NEVER_STOPS) as engine:
        stream = engine.generate(requests)
        assert (await anext(stream)).request_id == "short"
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: engine.stats().running == engine.stats().waiting == 0)
        assert engine.stats().tokens_generated < 240


# Failures.


async def test_a_failure_in_the_engine_reaches_everyone_who_waits(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_of(llama, concurrency=2) as engine:
        requests = [request(f"r{i}") for i in range(5)]
        await collect(engine.generate([request("before")]))

        def broken(*_: Any) -> None:
            raise RuntimeError("no memory left")

        monkeypatch.setattr(engine._model, "forward", broken)
        stream = engine.generate(requests)
        with pytest.raises(InfrastructureError, match="no memory left"):
            await collect(stream)
        with pytest.raises(InfrastructureError, match="no memory left"):
            engine.generate([request("after")])
        for call in (
            engine.abort(["r0"]),
            engine.swap({}, 1, UpdateMode.IN_PLACE),
        ):
            with pytest.raises(InfrastructureError, match="no memory left"):
                await call


async def test_a_failure_while_swapping_reaches_the_swap(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_of(llama) as engine:

        def broken(*_: Any) -> None:
            raise RuntimeError("disk on fire")

        monkeypatch.setattr(engine._model.weights, "write", broken)
        async with asyncio.timeout(SECONDS):
            with pytest.raises(InfrastructureError, match="disk on fire"):
                await engine.swap({}, 1, UpdateMode.DRAIN)


async def test_closing_fails_what_is_pending_and_may_be_repeated(llama: Path) -> None:
    engine = TorchEngine(llama, concurrency=1)
    running = asyncio.create_task(collect(engine.generate([request("r0"), request("r1")])))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(InfrastructureError, match="closed"):
        await running
    await engine.close()


def test_a_model_whose_attention_is_not_plain_is_refused(tmp_path: Path) -> None:
    """Soft caps change attention's numbers; the probe notices."""
    import torch
    from transformers import AutoModelForCausalLM, Gemma2Config

    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, attn_logit_softcapping=0.5,
        query_pre_attn_scalar=1, initializer_range=1.0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="plain causal attention only"):
        TorchEngine(tmp_path, concurrency=1)
