"""Policies on their way: bytes against entropy, speed against memory copies, pauses, a fleet.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/weights.py [--versions 100]
    [--short]

SmolLM2-135M-Instruct, one thread, CPU-seconds unless said otherwise. The updates are real:
gradients of a group-relative policy loss on the model's own samples of single-digit sums, AdamW on
float32 masters, rounded to bf16. Gradients are computed once and used in turn.

bytes_ratio_LR: Payload and manifest of a version, as a share of the full weights; mean.
entropy_ratio_LR: The same, over the entropy of positions (each tensor with its own density) and
    value differences (order 0) of the same versions.
identical: Every node's tensors equal the trainer's after all versions, by hash.
encode_vs_memcpy, apply_vs_memcpy: Full size over the time to find no change, and to decode, apply
    and verify a real delta (lr 1e-6), as a share of a memory copy's speed. cpu_seconds_1e-6:
    Publish, encode, hash, send, receive, verify, apply: all processes, per version.
step_slowdown: Seconds that `publish` takes from the trainer, over a training step of 64 such
samples.
pause_vs_full_load: The torch engine's pause for the elements that a delta changes, over loading the
    full weights: from the file (in the page cache) into the engine. pause_vs_full_swap: Over its
    pause for all tensors from host memory. Seconds on the wall, best of three.
tokens_kept: Its tokens per CPU-second under 20 such updates, a second apart, over those without.
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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import numpy as np
import torch
from common import finish
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from leeway import deltas, models, rpc, telemetry
from leeway.config import SecurityConfig, TelemetryConfig, UpdateMode, WeightsConfig
from leeway.deltas import Encoding, Tensor
from leeway.trajectory import Sampling
from leeway.v1 import weights_pb2 as pb
from leeway.v1 import weights_pb2_grpc as pb_grpc
from rollout_service.engines.base import GenerateRequest
from rollout_service.engines.torch_engine import TorchEngine
from rollout_service.engines.torch_model import ChangedElements
from rollout_service.receiver import PolicyReceiver
from rollout_service.relay import relaying
from trainer_service.weight_broadcast import WeightPublisher

RUN, OPEN, QUIET = "benchmark", SecurityConfig(), TelemetryConfig(log_level="error")
SERVICE = "leeway.v1.WeightBroadcast"
SAMPLES = 4


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


class Sink:
    """An engine that only keeps what it is given."""

    def __init__(self, held: Mapping[str, Tensor]) -> None:
        self.held = {name: tensor.copy() for name, tensor in held.items()}
        self.version = 0

    async def swap(self, tensors: Mapping[str, Any], version: int, mode: UpdateMode) -> float:
        for name, tensor in tensors.items():
            np.copyto(self.held[name], tensor)
        self.version = version
        return 0.0


@asynccontextmanager
async def node(
    address: str, engine: Any, held: Mapping[str, Tensor] | None, name: str, relay: Any = None
) -> AsyncIterator[PolicyReceiver]:
    async with rpc.connect(address, OPEN) as channel:
        receiver = PolicyReceiver(
            channel,
            engine,
            node_id=name,
            run_id=RUN,
            mode=UpdateMode.IN_PLACE,
            config=WeightsConfig(),
            initial=held,
            relay=relay,
        )
        task = asyncio.create_task(receiver.run())
        try:
            yield receiver
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def publisher(**config: Any) -> WeightPublisher:
    return WeightPublisher(RUN, 1, WeightsConfig(**config), OPEN, QUIET)


def cpu_of(pid: int | None) -> float:
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()  # noqa: PTH123, SIM115
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def whole_way(model: Any, grads: Any, lr: float, count: int) -> dict[str, Any]:
    before = {name: tensor.copy() for name, tensor in weights(model)}
    full = sum(tensor.nbytes for tensor in before.values())
    engine = Sink(before)
    sent, entropy, publishing, cpu = [], [], [], []
    with publisher(kept_versions=2) as broadcast:
        broadcast.publish(0, weights(model))
        start = {name: tensor.copy() for name, tensor in before.items()}
        async with node(broadcast.address, engine, start, "node") as receiver:
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
    same = all(deltas.digest_of(engine.held[n]) == deltas.digest_of(t) for n, t in before.items())
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
    changes = [(r, deltas.difference(base[r.name], new[r.name])) for r in deltas.describe(new)]
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
            assert deltas.digest_of(target[record.name]) == record.digest

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


async def pauses(
    directory: Any, base: Mapping[str, Tensor], new: Mapping[str, Tensor], short: bool
) -> dict[str, float]:
    engine = await asyncio.to_thread(TorchEngine, directory, concurrency=16, stop_tokens=())
    forth, back = {}, {}
    for name, tensor in new.items():
        places = np.flatnonzero((tensor != base[name]).reshape(-1))
        if places.size:
            forth[name] = ChangedElements(places, tensor.reshape(-1)[places])
            back[name] = ChangedElements(places, base[name].reshape(-1)[places])
    version = 0

    async def pause(updates: Mapping[str, Any]) -> float:
        nonlocal version
        version += 1
        return await engine.swap(updates, version, UpdateMode.IN_PLACE)

    async def load() -> float:
        started = time.perf_counter()
        files = [load_file(path) for path in sorted(directory.glob("*.safetensors"))]
        tensors = {
            name: tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
            for file in files
            for name, tensor in file.items()
        }
        await pause(tensors)
        return time.perf_counter() - started

    loading = min([await load() for _ in range(3)])
    full = min([await pause(dict(base)) for _ in range(3)])
    sparse = min([await pause(updates) for updates in (forth, back) * 2])

    async def speed(updates: int) -> float:
        done = asyncio.Event()
        length = 32 if short else 320

        async def generate() -> int:
            requests = [
                GenerateRequest(
                    f"{version}-{i}-{updates}",
                    np.arange(10, 50, dtype=np.int32) + i,
                    Sampling(max_new_tokens=length),
                    i,
                )
                for i in range(16)
            ]
            count = 0
            async for generation in engine.generate(requests):
                count += generation.token_ids.size
            done.set()
            return count

        started = time.process_time()
        running = asyncio.create_task(generate())
        for number in range(updates):
            if done.is_set():
                break
            await pause((forth, back)[number % 2])
            # Far more often than any trainer steps.
            await asyncio.sleep(0.1 if short else 1.0)
        return await running / (time.process_time() - started)

    await speed(0)
    kept = []
    for _ in range(1 if short else 2):
        without = await speed(0)
        kept.append(await speed(20) / without)
    await engine.close()
    return {
        "pause_vs_full_load": sparse / loading,
        "pause_vs_full_swap": sparse / full,
        "tokens_kept": float(np.median(kept)),
    }


# --- A fleet behind a slow link


class SlowLink(pb_grpc.WeightBroadcastServicer):
    """Between the publisher and the fleet: each flow has so many bytes a second."""

    def __init__(self, address: str, bytes_per_second: float) -> None:
        self._stub: Any = pb_grpc.WeightBroadcastStub(rpc.connect(address, OPEN))
        self._rate = bytes_per_second
        self.passed = 0

    async def Subscribe(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for announcement in self._stub.Subscribe(request):
            yield announcement

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        try:
            async for part in self._stub.Fetch(request):
                await asyncio.sleep(len(part.data) / self._rate)
                self.passed += len(part.data)
                yield part
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")

    async def GetManifest(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._stub.GetManifest(request)

    async def Report(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._stub.Report(request)

    async def Reparent(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._stub.Reparent(request)


async def fleet(nodes: int) -> dict[str, float]:
    generator = np.random.default_rng(0)
    held = {"w": generator.integers(0, 1 << 16, 4_000_000).astype(np.uint16)}
    relays = WeightsConfig(relay_address="127.0.0.1:0", chunk_bytes=32 << 10)
    seconds, copies = {}, 0.0
    for count in (1, nodes):
        with publisher(relay_fanout=4, chunk_bytes=32 << 10) as broadcast:
            broadcast.publish(0, held.items())
            broadcast.wait_announced(0, 60)
            link = SlowLink(broadcast.address, 150e3)

            async def add(server: rpc.Server, link: SlowLink = link) -> None:
                await server.add(pb_grpc.add_WeightBroadcastServicer_to_server, link, SERVICE)

            async with rpc.serve("127.0.0.1:0", OPEN, add) as server:
                stacks, receivers = [], []
                for number in range(count):
                    stack = AsyncExitStack()
                    relay = await stack.enter_async_context(relaying(relays, OPEN))
                    own = {name: tensor.copy() for name, tensor in held.items()}
                    member = node(server.address, Sink(held), own, f"n{number:02}", relay)
                    receivers.append(await stack.enter_async_context(member))
                    stacks.append(stack)
                await asyncio.gather(*(receiver.wait_for(0, 120) for receiver in receivers))
                after = {name: tensor.copy() for name, tensor in held.items()}
                places = generator.random(after["w"].size) < 0.1
                after["w"][places] += 1
                started = time.perf_counter()
                await asyncio.to_thread(broadcast.publish, 1, after.items())
                if count > 1:
                    while not link.passed:
                        await asyncio.sleep(0.01)
                    # The head of the tree among them.
                    victims = set(range(0, count, 11))
                    for number in victims:
                        await stacks[number].aclose()
                    receivers = [r for i, r in enumerate(receivers) if i not in victims]
                await asyncio.gather(*(receiver.wait_for(1, 120) for receiver in receivers))
                seconds[count] = time.perf_counter() - started
                changes = [
                    (r, deltas.difference(held[r.name], after[r.name]))
                    for r in deltas.describe(after)
                ]
                copies = link.passed / len(deltas.pack(changes).payload)
                for stack in stacks:
                    await stack.aclose()
    return {"egress_copies_64": copies, "fleet_time_ratio": seconds[nodes] / seconds[1]}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--versions", type=int, default=100)
    parser.add_argument("--short", action="store_true", help="4 versions, 16 nodes")
    arguments = parser.parse_args()
    count = 4 if arguments.short else arguments.versions
    torch.set_num_threads(1)
    torch.manual_seed(0)
    telemetry.setup(QUIET)
    figures: dict[str, Any] = await fleet(16 if arguments.short else 64)
    directory = models.resolve("smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(directory)

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    grads, seconds = gradients(load(), tokenizer, 2 if arguments.short else 3)
    for lr, key in ((1e-6, "1e6"), (1e-5, "1e5")):
        model = load()
        result = await whole_way(model, grads, lr, count)
        figures[f"bytes_ratio_{key}"] = result["bytes_ratio"]
        figures[f"entropy_ratio_{key}"] = result["entropy_ratio"]
        figures[f"cpu_seconds_{key}"] = result["cpu"]
        figures["identical"] = figures.get("identical", True) and result["identical"]
        # A step of 64 samples takes at least 64 / SAMPLES of these gradients.
        figures["step_slowdown"] = result["publish"] / (seconds * 64 / SAMPLES)
        if lr == 1e-6:
            base = {name: tensor.copy() for name, tensor in weights(model)}
            next(versions(model, grads, lr, 1))
            new = {name: tensor.copy() for name, tensor in weights(model)}
        del model
    del grads
    figures |= speeds(base, new)
    figures |= await pauses(directory, base, new, arguments.short)
    finish(0, **{k: round(v, 5) if isinstance(v, float) else v for k, v in figures.items()})


if __name__ == "__main__":
    asyncio.run(main())
