"""Policies on their way: bytes against entropy, speed against memory copies, pauses, a fleet.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python -m benchmarks.weights [--versions 100]
    [--short]

SmolLM2-135M-Instruct, one thread, CPU-seconds unless said otherwise. The updates are real:
gradients of a group-relative policy loss on the model's own samples of single-digit sums, AdamW on
float32 masters, rounded to bf16. Gradients are computed once and used in turn.

bytes_ratio_LR: Payload and manifest of a version, as a share of the full weights; mean.
entropy_ratio_LR: The same, over the entropy of positions (each tensor with its own density) and
    value differences (order 0) of the same versions.
identical: Every node's tensors equal the trainer's after all versions (a fifth of them at 1e-5), by
    hash.
encode_vs_memcpy, apply_vs_memcpy: Full size over the time to find no change, and to decode, apply
    and verify a real delta (lr 1e-6), as a share of a memory copy's speed. cpu_seconds_1e-6:
    Publish, encode, hash, send, receive, verify, apply: all processes, per version.
step_slowdown: Seconds that the canary and `publish` take from the trainer, over a training step of
    64 such samples.
pause_vs_full_load: The torch engine's pause for the elements that a delta changes, over loading the
    full weights: from the file (in the page cache) into the engine. pause_vs_full_swap: Over its
    pause for all tensors from host memory. Seconds on the wall, best of several.
tokens_kept: Its tokens per CPU-second in 20 windows of 10 seconds that begin with such an update
    and its canary, over those in as many shorter windows between.
egress_copies_64, fleet_time_ratio: 64 nodes under a relay tree of fan-out 4, a tenth killed while
    the payload flows, a slow link (simulated) between clusters: payloads that left the publisher,
    and seconds on the wall until all have it, over those of one node alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import finish
from benchmarks.fleet import OPEN, Fleet, Gate, MemoryEngine, node, publisher, serving
from leeway import deltas, models, rpc, telemetry
from leeway.config import TelemetryConfig, TrainerConfig, UpdateMode, WeightsConfig
from leeway.manifests import Canary
from leeway.tensors import Encoding, Tensor, describe, digest_of
from leeway.trajectory import Sampling
from leeway.v1 import weights_pb2 as pb
from leeway.v1 import weights_pb2_grpc as pb_grpc
from rollout_service.engines.base import ChangedElements, GenerateRequest, Update
from rollout_service.engines.torch_engine import TorchEngine
from trainer_service.backends.torch_backend import TorchBackend
from trainer_service.canary import CanaryText

SAMPLES = 4
# A training step of 64 such samples takes three times as long.
UPDATES, UPDATE_SECONDS, CONTROL_SECONDS = 20, 10.0, 5.0
CHUNK_BYTES = 32 << 10
LINK_BYTES_PER_SECOND = 150e3


# --- Real updates


def gradients(model: Any, tokenizer: Any, groups: int) -> tuple[list[list[torch.Tensor]], float]:
    """Policy gradients of mixed groups, and the CPU-seconds that one took."""
    made: list[list[torch.Tensor]] = []
    seconds = 0.0
    rng = random.Random(0)
    while len(made) < groups:
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        question = [{"role": "user", "content": f"What is {a} + {b}?"}]
        prompt = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        rows = prompt.repeat(8, 1)
        with torch.no_grad():
            out = model.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                do_sample=True,
                top_k=0,
                max_new_tokens=16,
                pad_token_id=2,
            )
        answers = tokenizer.batch_decode(out[:, prompt.shape[1] :], skip_special_tokens=True)
        rewards = torch.tensor([float(str(a + b) in answer) for answer in answers])
        if rewards.std() == 0:
            continue
        advantages = (rewards - rewards.mean()) / rewards.std()
        order = advantages.abs().argsort(descending=True)[:SAMPLES]
        started = time.process_time()
        tokens, start = out[order], prompt.shape[1]
        logits = model(tokens).logits[:, start - 1 : -1].log_softmax(-1)
        chosen = logits.gather(-1, tokens[:, start:, None])[..., 0]
        (-(advantages[order][:, None] * chosen).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
        seconds = time.process_time() - started
    return made, seconds


def versions(model: Any, grads: list[list[torch.Tensor]], lr: float, count: int) -> Iterator[None]:
    """AdamW moves the model's masters once a version."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0)
    for version in range(count):
        for parameter, grad in zip(model.parameters(), grads[version % len(grads)], strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
        yield


def weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        values = parameter.detach().to(torch.bfloat16).view(torch.int16).numpy()
        yield name, values.view(np.uint16)


def entropy_bytes(base: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> float:
    bits = 0.0
    words = []
    for name, tensor in new.items():
        moved = (tensor - base[name]).reshape(-1)
        words.append(moved[moved != 0])
        p = words[-1].size / tensor.size
        if 0 < p < 1:
            bits -= tensor.size * (p * np.log2(p) + (1 - p) * np.log2(1 - p))
    counts = np.unique(np.concatenate(words), return_counts=True)[1]
    bits -= float((counts * np.log2(counts / counts.sum())).sum())
    return bits / 8


# --- The whole way, one node


def scoring_seconds(directory: Path, text: CanaryText) -> float:
    """What the canary of one version costs the trainer, in CPU-seconds."""
    backend = TorchBackend(directory, TrainerConfig())
    taken = []
    for _ in range(5):
        started = time.process_time()
        text.score(backend)
        taken.append(time.process_time() - started)
    return float(np.median(taken))


def cpu_of(pid: int | None) -> float:
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()  # noqa: PTH123, SIM115
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def whole_way(model: Any, grads: Any, lr: float, count: int) -> dict[str, Any]:
    before = {name: tensor.copy() for name, tensor in weights(model)}
    full = sum(tensor.nbytes for tensor in before.values())
    engine = MemoryEngine(before)
    sent, entropy, publishing, cpu = [], [], [], []
    with publisher(kept_versions=2) as broadcast:
        broadcast.publish(0, weights(model))
        start = {name: tensor.copy() for name, tensor in before.items()}
        async with node(broadcast.address, engine, start) as receiver:
            await receiver.wait_for(0, 120)
            async with rpc.connect(broadcast.address, OPEN) as channel:
                stub: Any = pb_grpc.WeightBroadcastStub(channel)
                for version, _ in enumerate(versions(model, grads, lr, count), 1):
                    # The conversion to bf16 is the backend's, not the broadcast's.
                    after = {name: tensor.copy() for name, tensor in weights(model)}
                    base_digest = receiver.digest
                    child, own = cpu_of(broadcast.pid), time.process_time()
                    started = time.perf_counter()
                    broadcast.publish(version, after.items())
                    publishing.append(time.perf_counter() - started)
                    await receiver.wait_for(version, 120)
                    cpu.append(cpu_of(broadcast.pid) - child + time.process_time() - own)
                    request = pb.GetManifestRequest(version=version, base_digest=base_digest)
                    sealed = await stub.GetManifest(request)
                    length = pb.Manifest.FromString(sealed.manifest).payload_length
                    sent.append(length + len(sealed.manifest))
                    entropy.append(entropy_bytes(before, after))
                    before = after
    same = all(digest_of(engine.weights[n]) == digest_of(t) for n, t in before.items())
    return {
        "bytes_ratio": sum(sent) / count / full,
        "entropy_ratio": sum(sent) / sum(entropy),
        "identical": same,
        "publish": float(np.median(publishing)),
        "cpu": float(np.median(cpu)),
    }


# --- Speed against memory copies


def speeds(base: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, float]:
    target = {name: tensor.copy() for name, tensor in base.items()}
    twin = {name: tensor.copy() for name, tensor in base.items()}
    changes = [(r, deltas.difference(base[r.name], new[r.name])) for r in describe(new)]
    delta = deltas.pack(changes)

    def copy() -> None:
        for name, tensor in base.items():
            np.copyto(target[name], tensor)

    def compare() -> None:
        for name, tensor in base.items():
            assert deltas.difference(tensor, twin[name]).encoding is Encoding.SAME

    def restore_and_apply() -> None:
        for record, change in deltas.unpack(delta.records, delta.payload):
            deltas.apply(change, target[record.name])
            assert digest_of(target[record.name]) == record.digest

    def best(action: Callable[[], None], prepare: Callable[[], None] = lambda: None) -> float:
        taken = []
        for _ in range(5):
            prepare()
            started = time.process_time()
            action()
            taken.append(time.process_time() - started)
        return min(taken)

    memcpy = best(copy)
    return {
        "encode_vs_memcpy": memcpy / best(compare),
        "apply_vs_memcpy": memcpy / best(restore_and_apply, copy),
    }


# --- Pauses of the engine


def moves(
    base: Mapping[str, Tensor], new: Mapping[str, Tensor]
) -> tuple[dict[str, Update], dict[str, Update]]:
    """The elements that lead from one policy to the next, and back."""
    forth: dict[str, Update] = {}
    back: dict[str, Update] = {}
    for name, tensor in new.items():
        places = np.flatnonzero((tensor != base[name]).reshape(-1))
        if places.size:
            forth[name] = ChangedElements(places, tensor.reshape(-1)[places])
            back[name] = ChangedElements(places, base[name].reshape(-1)[places])
    return forth, back


def canary_of(model: Any, text: CanaryText, tensors: Mapping[str, Tensor]) -> Canary:
    """By plain transformers, under the given weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(tensors[name].view(np.int16)).view(torch.bfloat16))
        logits = model(torch.from_numpy(text.token_ids)[None]).logits[0, :-1].log_softmax(-1)
    chosen = logits.gather(1, torch.from_numpy(text.token_ids[1:, None]))[:, 0]
    return Canary(text.token_ids.astype(np.int32), chosen.numpy(), 1e-3)


async def pauses(
    directory: Path,
    base: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    canaries: tuple[Canary, Canary],
    short: bool,
) -> dict[str, float]:
    """`canaries`: of `base` and of `new`."""
    engine = await asyncio.to_thread(TorchEngine, directory, concurrency=16, stop_tokens=())
    forth, back = moves(base, new)
    version = 0

    async def update(updates: Mapping[str, Update], canary: Canary | None = None) -> float:
        nonlocal version
        version += 1
        return await engine.swap(updates, version, UpdateMode.IN_PLACE, canary)

    async def load() -> float:
        started = time.perf_counter()
        files = [load_file(path) for path in sorted(directory.glob("*.safetensors"))]
        tensors = {
            name: tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
            for file in files
            for name, tensor in file.items()
        }
        await update(tensors)
        return time.perf_counter() - started

    loading = min([await load() for _ in range(5)])
    full = min([await update(base) for _ in range(5)])
    sparse = min([await update(updates) for updates in (forth, back) * 5])

    async def kept() -> float:
        """A full batch all the time; every other window begins with an update."""
        requests = [
            GenerateRequest(
                f"{number}",
                np.arange(10, 50, dtype=np.int32) + number,
                Sampling(max_new_tokens=32 + 37 * number % 64),
                number,
            )
            for number in range(1000)
        ]
        stream = engine.generate(requests)
        await asyncio.sleep(CONTROL_SECONDS)
        speeds = np.zeros((2, 2))
        for number in range(2 * (4 if short else UPDATES)):
            before, started = engine.stats().tokens_generated, time.process_time()
            if number % 2:
                await update((forth, back)[number // 2 % 2], canaries[1 - number // 2 % 2])
            await asyncio.sleep(UPDATE_SECONDS if number % 2 else CONTROL_SECONDS)
            made = engine.stats().tokens_generated - before
            speeds[number % 2] += made, time.process_time() - started
        await engine.abort([request.request_id for request in requests])
        assert len([generation async for generation in stream]) == len(requests)
        (without, alone), (updated, taken) = speeds
        return float(updated / taken / (without / alone))

    figures = {
        "pause_vs_full_load": sparse / loading,
        "pause_vs_full_swap": sparse / full,
        "tokens_kept": await kept(),
    }
    await engine.close()
    return figures


# --- A fleet behind a slow link


async def fleet_figures(nodes: int) -> dict[str, float]:
    generator = np.random.default_rng(0)
    held = {"w": generator.integers(0, 1 << 16, 4_000_000).astype(np.uint16)}
    after = {name: tensor.copy() for name, tensor in held.items()}
    after["w"][generator.random(after["w"].size) < 0.1] += 1
    changes = [(r, deltas.difference(held[r.name], after[r.name])) for r in describe(after)]
    payload = len(deltas.pack(changes).payload)
    alone, _ = await spread(1, held, after)
    together, passed = await spread(nodes, held, after)
    return {"egress_copies_64": passed / payload, "fleet_time_ratio": together / alone}


async def spread(
    nodes: int, held: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> tuple[float, int]:
    """Seconds until the whole fleet has a new version, and payload bytes that left for it."""
    with publisher(relay_fanout=4, chunk_bytes=CHUNK_BYTES) as broadcast:
        broadcast.publish(0, held.items())
        broadcast.wait_announced(0, 60)
        async with rpc.connect(broadcast.address, OPEN) as channel:
            gate = Gate(channel, LINK_BYTES_PER_SECOND)
            async with serving(gate) as address, Fleet(address, CHUNK_BYTES) as fleet:
                for number in range(nodes):
                    await fleet.add(number, held)
                await fleet.all_at(0, 120)
                started = time.perf_counter()
                await asyncio.to_thread(broadcast.publish, 1, after.items())
                if nodes > 1:
                    while not gate.passed:
                        await asyncio.sleep(0.01)
                    # The head of the tree among them.
                    for number in range(0, nodes, 11):
                        await fleet.kill(number)
                await fleet.all_at(1, 120)
                return time.perf_counter() - started, gate.passed


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--versions", type=int, default=100)
    parser.add_argument("--short", action="store_true", help="4 versions, 16 nodes")
    arguments = parser.parse_args()
    count = 4 if arguments.short else arguments.versions
    torch.set_num_threads(1)
    torch.manual_seed(0)
    telemetry.setup(TelemetryConfig(log_level="error"))
    figures: dict[str, Any] = await fleet_figures(16 if arguments.short else 64)
    directory = models.resolve("smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(directory)

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    text = CanaryText(directory, WeightsConfig())
    scoring = scoring_seconds(directory, text)
    grads, seconds = gradients(load(), tokenizer, 2 if arguments.short else 3)
    for lr, key, times in ((1e-6, "1e6", count), (1e-5, "1e5", max(1, count // 5))):
        model = load()
        result = await whole_way(model, grads, lr, times)
        figures[f"bytes_ratio_{key}"] = result["bytes_ratio"]
        figures[f"entropy_ratio_{key}"] = result["entropy_ratio"]
        figures[f"cpu_seconds_{key}"] = result["cpu"]
        figures["identical"] = figures.get("identical", True) and result["identical"]
        # A step of 64 samples takes at least 64 / SAMPLES of these gradients.
        figures["step_slowdown"] = (scoring + result["publish"]) / (seconds * 64 / SAMPLES)
        if lr == 1e-6:
            base = {name: tensor.copy() for name, tensor in weights(model)}
            next(versions(model, grads, lr, 1))
            new = {name: tensor.copy() for name, tensor in weights(model)}
        del model
    del grads
    figures |= speeds(base, new)
    model = load()
    canaries = canary_of(model, text, base), canary_of(model, text, new)
    del model
    figures |= await pauses(directory, base, new, canaries, arguments.short)
    finish(0, **{k: round(v, 5) if isinstance(v, float) else v for k, v in figures.items()})


if __name__ == "__main__":
    asyncio.run(main())
