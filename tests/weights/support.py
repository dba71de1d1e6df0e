"""Weights that change as under RL, an engine in memory, and both ends of a broadcast."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from leeway import rpc
from leeway.config import SecurityConfig, TelemetryConfig, UpdateMode, WeightsConfig
from leeway.deltas import Tensor
from leeway.manifests import Canary
from rollout_service.engines.base import Engine, EngineStats, GenerateRequest, Generation
from rollout_service.receiver import PolicyReceiver
from rollout_service.relay import Relay
from trainer_service.weight_broadcast import WeightPublisher

RUN = "test-run"
DEADLINE = 30.0
OPEN = SecurityConfig()
PROMPT = np.arange(5, dtype=np.int32)


class Trainer:
    """float32 masters and their bfloat16 values; `step` moves them a little."""

    def __init__(self, seed: int = 0, scale: int = 1) -> None:
        self._random = np.random.default_rng(seed)
        shapes = {
            "embed.weight": (64 * scale, 33),
            "norm.weight": (33,),
            "layer.weight": (48, 40 * scale),
            "head.bias": (7,),
        }
        self.masters = {
            name: self._random.normal(0, 0.05, shape).astype(np.float32)
            for name, shape in shapes.items()
        }

    def step(self, size: float = 3e-5) -> None:
        for name, master in self.masters.items():
            if name != "head.bias":
                master += self._random.normal(0, size, master.shape).astype(np.float32)

    def weights(self) -> dict[str, Tensor]:
        return {name: bf16(master) for name, master in self.masters.items()}

    def canary(self) -> Canary:
        return Canary(PROMPT, logprobs_of(self.weights()), tolerance=1e-6)


def bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to the nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def logprobs_of(weights: Mapping[str, Tensor]) -> npt.NDArray[np.float32]:
    """float32 [4]; depends on every bit of the weights."""
    sums = [int(weights[name].astype(np.uint64).sum()) % 997 for name in sorted(weights)]
    return -np.array(sums, dtype=np.float32) / 100


class MemoryEngine:
    """An engine that generates nothing; it keeps what it is given, and counts."""

    def __init__(self, weights: Mapping[str, Tensor] | None = None) -> None:
        self.weights = {name: tensor.copy() for name, tensor in (weights or {}).items()}
        self.version = 0
        self.context_length = 128
        self.vocabulary_size = 64
        self.swaps: list[tuple[int, list[str]]] = []
        self.breaks: Callable[[dict[str, Tensor]], None] = lambda weights: None

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Generation]:
        raise NotImplementedError

    async def abort(self, request_ids: Sequence[str]) -> None:
        raise NotImplementedError

    async def swap(
        self, tensors: Mapping[str, npt.NDArray[Any]], version: int, mode: UpdateMode
    ) -> float:
        self.weights.update({name: tensor.copy() for name, tensor in tensors.items()})
        self.breaks(self.weights)
        self.version = version
        self.swaps.append((version, sorted(tensors)))
        return 0.001

    async def logprobs(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        assert token_ids.tolist() == PROMPT.tolist()
        return logprobs_of(self.weights)

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0, 0.0, 0, 0.0)

    async def close(self) -> None:
        return


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[k], right[k]) for k in left)


def publisher(incarnation: int = 1, **weights: Any) -> WeightPublisher:
    config = WeightsConfig(**{"chunk_bytes": 1024, **weights})
    return WeightPublisher(RUN, incarnation, config, OPEN, TelemetryConfig(log_level="warning"))


def publish(target: WeightPublisher, version: int, trainer: Trainer) -> None:
    """Publishes and waits until it is announced."""
    target.publish(version, trainer.weights().items(), trainer.canary())
    target.wait_announced(version, DEADLINE)


@asynccontextmanager
async def node(
    address: str,
    engine: Engine,
    initial: Mapping[str, Tensor] | None = None,
    node_id: str = "node",
    relay: Relay | None = None,
) -> AsyncIterator[PolicyReceiver]:
    """A receiver that runs for the duration of the context."""
    channel = rpc.connect(address, OPEN)
    receiver = PolicyReceiver(
        channel,
        engine,
        node_id=node_id,
        run_id=RUN,
        mode=UpdateMode.IN_PLACE,
        config=WeightsConfig(),
        initial=initial,
        relay=relay,
    )
    task = asyncio.create_task(receiver.run())
    try:
        yield receiver
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await channel.close()
