"""The torch engine against `transformers.generate`, and against the bound of its linear layers.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/engine.py [--short] [--model DIR]

All figures are tokens per CPU-second of this process, one thread, float32, SmolLM2-135M-Instruct.
The sides run in turn, several times; a key is the median over the repeats, and `spread` holds the
lowest and highest of each.

ratio_to_generate_N: The same 3 N requests (at least 96; short: 2 N) on both sides: prompts of 40 to
    80 tokens, answers of log-normal length (median 32, sigma 0.8, at most 128), sampled at
    temperature 1. The engine runs N at once and admits as others end. `generate` gets what a plain
    user gives it: batches of N in the order of the requests, padded on the left, each run to its
    longest answer; only the tokens that were asked for count. Lengths are forced: neither side has
    a stop token, the engine has each request's own max_new_tokens. Prefill is included.
to_bound_N: Decoding alone, N sequences at once, all the time: 64 steps after a prompt of 40 to 80
    tokens, in turn with as many passes of N rows through nothing but the model's linear layers and
    head. The engine's scheduler is stepped directly, so that the two alternate.
mixed_to_bound_N: The first workload against that bound, with the linear layers of prefill added:
    what is left to win for any engine that decodes N rows at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import finish
from leeway import models
from leeway.trajectory import Sampling
from rollout_service.engines.base import GenerateRequest
from rollout_service.engines.scheduler import PREFILL_TOKENS, ContinuousBatch, RunningSequence
from rollout_service.engines.torch_engine import TorchEngine
from rollout_service.engines.torch_model import HeldModel

DECODED = 64
TURN = 8


def workload(count: int, seed: int, vocabulary: int) -> list[GenerateRequest]:
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(np.log(32), 0.8, count), 1, 128).astype(int)
    return [
        GenerateRequest(
            request_id=str(i),
            prompt=random.integers(10, vocabulary, random.integers(40, 81)).astype(np.int32),
            sampling=Sampling(max_new_tokens=int(length)),
            seed=i,
        )
        for i, length in enumerate(lengths)
    ]


def cpu_seconds(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def run_engine(engine: TorchEngine, requests: list[GenerateRequest]) -> None:
    async def collect() -> None:
        got = {g.request_id: g.token_ids.size async for g in engine.generate(requests)}
        assert got == {r.request_id: r.sampling.max_new_tokens for r in requests}

    asyncio.run(collect())


def run_generate(model: Any, requests: list[GenerateRequest], batch: int) -> None:
    for start in range(0, len(requests), batch):
        part = requests[start : start + batch]
        longest = max(r.prompt.size for r in part)
        ids = torch.zeros(len(part), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(part):
            ids[row, -request.prompt.size :] = torch.from_numpy(request.prompt)
            mask[row, -request.prompt.size :] = 1
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                eos_token_id=None,
                pad_token_id=0,
                max_new_tokens=max(r.sampling.max_new_tokens for r in part),
            )
        assert out.shape[1] == longest + max(r.sampling.max_new_tokens for r in part)


class Linears:
    """The model's linear layers, in its order, on inputs of the right shape."""

    def __init__(self, model: Any) -> None:
        modules = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        self._head = model.get_output_embeddings()
        self._body = [m for m in modules if m is not self._head]

    def cpu_seconds(self, rows: int, head_rows: int, passes: int) -> float:
        inputs = {m.in_features: torch.randn(rows, m.in_features) for m in self._body}
        hidden = torch.randn(head_rows, self._head.in_features)

        def work() -> None:
            with torch.inference_mode():
                for _ in range(passes):
                    for module in self._body:
                        module(inputs[module.in_features])
                    self._head(hidden)

        return cpu_seconds(work)


def decode_and_bound(
    directory: Path, linears: Linears, requests: list[GenerateRequest]
) -> tuple[float, float]:
    """CPU-seconds of DECODED steps of all the requests at once, and of the linear layers alone."""
    batch = ContinuousBatch(HeldModel(directory), len(requests), stop_tokens=(), version=0)
    endless = Sampling(max_new_tokens=4 * DECODED)
    batch.submit(RunningSequence(replace(r, sampling=endless), submitted=0.0) for r in requests)

    def steps(count: int) -> None:
        for _ in range(count):
            batch.step(admit=True)

    decode = bound = 0.0
    with torch.inference_mode():
        while batch.waiting:
            steps(1)
        for _ in range(0, DECODED, TURN):
            decode += cpu_seconds(lambda: steps(TURN))
            bound += linears.cpu_seconds(len(requests), len(requests), passes=TURN)
    return decode, bound


def measure(directory: Path, batch: int, model: Any, seed: int, count: int) -> dict[str, float]:
    """One repeat of every side at one concurrency."""
    requests = workload(count, seed, model.config.vocab_size)
    linears = Linears(model)
    decode, bound = decode_and_bound(directory, linears, requests[:batch])
    engine = TorchEngine(directory, concurrency=batch, stop_tokens=())
    try:
        run_engine(engine, requests[:1])
        mixed = cpu_seconds(lambda: run_engine(engine, requests))
    finally:
        asyncio.run(engine.close())
    generate = cpu_seconds(lambda: run_generate(model, requests, batch))
    tokens = sum(r.sampling.max_new_tokens for r in requests)
    prompts = sum(r.prompt.size for r in requests)
    prefill_bound = linears.cpu_seconds(PREFILL_TOKENS, 1, 4) * prompts / (4 * PREFILL_TOKENS)
    mixed_bound = prefill_bound + bound / (DECODED * batch) * tokens
    return {
        f"ratio_to_generate_{batch}": generate / mixed,
        f"to_bound_{batch}": bound / decode,
        f"mixed_to_bound_{batch}": mixed_bound / mixed,
        f"engine_{batch}": tokens / mixed,
        f"engine_decode_{batch}": DECODED * batch / decode,
        f"generate_{batch}": tokens / generate,
        f"bound_{batch}": DECODED * batch / bound,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--short", action="store_true", help="fewer requests, one repeat")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name or directory")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    repeats = 1 if options.short else options.repeats
    torch.set_num_threads(1)

    directory = models.resolve(options.model)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    runs: list[dict[str, float]] = []
    for repeat in range(repeats):
        runs.append({})
        for batch in options.concurrency:
            count = 2 * batch if options.short else max(3 * batch, 96)
            runs[-1] |= measure(directory, batch, model, options.seed + repeat, count)
        print(json.dumps({k: round(v, 3) for k, v in runs[-1].items()}), flush=True)
    figures: dict[str, Any] = {
        key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]
    }
    figures["spread"] = {
        key: [round(min(run[key] for run in runs), 3), round(max(run[key] for run in runs), 3)]
        for key in runs[0]
    }
    finish(options.seed, **figures)


if __name__ == "__main__":
    main()
