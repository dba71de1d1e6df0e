"""What the gateway costs, and what streaming single trajectories brings.

    python -m benchmarks.gateway latency --model ~/.cache/leeway/models/smollm2-135m-instruct
    python -m benchmarks.gateway streaming

`latency`: a client in a process of its own asks for answers over HTTP; what each took, minus what
the engine says that it took, is what the gateway and HTTP added. Then 64 sessions at once ask for
the same answers of the bare engine and of the gateway.

`streaming`: agents whose tool takes 0.1 to 60 s (log-normal; 1 % of it lies outside, and is cut),
with time compressed. One side begins a session as soon as another ends, the other waits for whole
batches, with as many sessions outstanding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.common import finish
from benchmarks.gateway_client import question
from leeway.trajectory import Sampling, Task
from rollout_service.answers import AnswerFormat
from rollout_service.engines.base import GenerateRequest
from rollout_service.engines.torch_engine import TorchEngine
from rollout_service.gateway.answering import Gateway
from rollout_service.gateway.requests import Ask
from rollout_service.gateway.server import build_app, serve
from rollout_service.gateway.sessions import Session
from rollout_service.prompts import Renderer
from rollout_service.workflows.agents import Agents
from rollout_service.workflows.base import Event, Sample
from rollout_service.workflows.programs import ExternalProgram

TOKENS = 32
FASTEST, SLOWEST = 0.1, 60.0
# 99 % of a normal distribution lie within so many standard deviations.
DEVIATIONS = 2.576


@asynccontextmanager
async def serving(model: Path, concurrency: int) -> AsyncIterator[tuple[TorchEngine, Gateway, str]]:
    engine = TorchEngine(model, concurrency=concurrency)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    renderer = Renderer(tokenizer, engine.context_length, TOKENS)
    gateway = Gateway(engine, renderer, AnswerFormat(tokenizer), max_requests=4096)
    app = build_app(gateway, "policy", ExternalProgram(), token=None)
    try:
        async with serve(app, "127.0.0.1:0") as address:
            yield engine, gateway, f"http://{address}"
    finally:
        await engine.close()


# Latency ------------------------------------------------------------------------------------------


async def client_process(url: str, keys: Sequence[str], rounds: int) -> dict[str, Any]:
    """The client in a process of its own, so that its work is not the gateway's."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("gateway_client.py")),
        url, str(rounds), str(TOKENS), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate(json.dumps(list(keys)).encode())
    return dict(json.loads(output))


async def bare(engine: TorchEngine, gateway: Gateway, sessions: int, rounds: int) -> float:
    """Seconds for the same answers, of the engine alone."""
    renderer = gateway._renderer
    sampling = Sampling(temperature=1.0, max_new_tokens=TOKENS)

    async def session(number: int) -> None:
        for turn in range(rounds):
            text = renderer.prompt_text(question(1000 * turn + number))
            request = GenerateRequest(
                f"bare/{number}/{turn}", renderer.encode(text), sampling, seed=number
            )
            async for _ in engine.generate([request]):
                pass

    started = time.perf_counter()
    await asyncio.gather(*(session(i) for i in range(sessions)))
    return time.perf_counter() - started


async def latency(model: Path, sessions: int, rounds: int) -> dict[str, float]:
    async with serving(model, sessions) as (engine, gateway, url):
        sampling = Sampling(temperature=1.0, max_new_tokens=TOKENS)

        def opened(count: int) -> list[Session]:
            return [gateway.open(sampling, seed) for seed in range(count)]

        (alone,) = opened(1)
        await client_process(url, [alone.key], 4)
        (alone,) = opened(1)
        timed = await client_process(url, [alone.key], 30)
        engine_seconds = [answer.seconds for answer in alone.conversation.answers]
        added = [t - e for t, e in zip(timed["seconds"], engine_seconds, strict=True)]
        bare_seconds, gateway_seconds = [], []
        for _ in range(3):
            bare_seconds.append(await bare(engine, gateway, sessions, rounds))
            many = await client_process(url, [one.key for one in opened(sessions)], rounds)
            gateway_seconds.append(many["wall"])
    best_bare, best_gateway = min(bare_seconds), min(gateway_seconds)
    return {
        "added_ms_median": 1000 * statistics.median(added),
        "added_ms_p90": 1000 * float(np.quantile(added, 0.9)),
        "sessions": sessions,
        "bare_seconds": best_bare,
        "gateway_seconds": best_gateway,
        "added_percent": 100 * (best_gateway / best_bare - 1),
    }


# Streaming ----------------------------------------------------------------------------------------


class SlowTools:
    """Asks, calls a tool that takes its time, and asks again."""

    def __init__(self, compressed: float) -> None:
        self._compressed = compressed

    async def run(self, sample: Sample, session: Session) -> None:
        rng = random.Random(sample.seed)
        messages = list(map(dict, sample.task.messages))
        for turn in range(2):
            call = session.ask(Ask(messages=tuple(messages)), str(turn))
            choice = (await call.deliver()).choices[0]
            if turn == 0:
                await asyncio.sleep(tool_seconds(rng) / self._compressed)
                messages += [choice.message, {"role": "user", "content": "done"}]
        session.finish(1.0)


def tool_seconds(rng: random.Random) -> float:
    middle = math.sqrt(FASTEST * SLOWEST)
    sigma = math.log(SLOWEST / middle) / DEVIATIONS
    return min(max(rng.lognormvariate(math.log(middle), sigma), FASTEST), SLOWEST)


async def streaming(model: Path, sessions: int, at_once: int, compressed: float) -> dict[str, Any]:
    async with serving(model, at_once) as (_, gateway, _):
        workflow = Agents(gateway, SlowTools(compressed), "node", 600.0)
        sampling = Sampling(temperature=1.0, max_new_tokens=8)

        def samples(name: str) -> list[Sample]:
            return [
                Sample(
                    f"{name}/{i}",
                    Task(f"{name}{i}", i, ({"role": "user", "content": "hi"},), {}, 2, sampling, i),
                    0,
                )
                for i in range(sessions)
            ]

        async def heard(event: Event) -> None:
            pass

        started = time.perf_counter()
        given = samples("batch")
        for first in range(0, sessions, at_once):
            await workflow.run(given[first : first + at_once], heard)
        batches = time.perf_counter() - started

        room = asyncio.Semaphore(at_once)

        async def one(sample: Sample) -> None:
            async with room:
                await workflow.run([sample], heard)

        started = time.perf_counter()
        await asyncio.gather(*(one(sample) for sample in samples("stream")))
        streamed = time.perf_counter() - started
    return {
        "sessions": sessions,
        "at_once": at_once,
        "compressed": compressed,
        "batch_seconds": batches,
        "streaming_seconds": streamed,
        "speedup": batches / streamed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["latency", "streaming"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    if options.short:
        options.sessions, options.rounds = 16, 1
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model
        if model is None:
            from tests.gateway import agent_model

            model = agent_model.build(Path(scratch), trained=False)
        if options.part == "latency":
            result: dict[str, Any] = asyncio.run(latency(model, options.sessions, options.rounds))
        else:
            sessions = 96 if options.short else 256
            result = asyncio.run(streaming(model, sessions, at_once=32, compressed=20.0))
    finish(0, **{name: round(value, 4) for name, value in result.items()})


if __name__ == "__main__":
    main()
