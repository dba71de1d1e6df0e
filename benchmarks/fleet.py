"""Both ends of a weight broadcast and a fleet between, in one process: what the tests of the
weights and their benchmark share.

The publisher, its process, gRPC, relays and receivers are the real ones; only the engines generate
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from leeway import rpc
from leeway.config import SecurityConfig, TelemetryConfig, UpdateMode, WeightsConfig
from leeway.manifests import Canary
from leeway.tensors import Tensor
from leeway.v1 import weights_pb2 as pb
from leeway.v1 import weights_pb2_grpc as pb_grpc
from rollout_service.engines.base import (
    ChangedElements,
    Engine,
    EngineLoad,
    EngineStats,
    GenerateRequest,
    Generation,
    Update,
    prove,
)
from rollout_service.receiver import PolicyReceiver
from rollout_service.relay import Relay, relaying
from trainer_service.weight_broadcast import WeightPublisher

RUN = "fleet"
OPEN = SecurityConfig()
PROMPT = np.arange(5, dtype=np.int32)


def logprobs_of(weights: Mapping[str, Tensor]) -> npt.NDArray[np.float32]:
    """float32 [tensors]; depends on every bit of the weights."""
    sums = [int(weights[name].astype(np.uint64).sum()) % 997 for name in sorted(weights)]
    return -np.array(sums, dtype=np.float32) / np.float32(100)


class MemoryEngine:
    """An engine that generates nothing; it keeps what it is given, and counts."""

    def __init__(self, weights: Mapping[str, Tensor] | None = None) -> None:
        self.weights = {name: tensor.copy() for name, tensor in (weights or {}).items()}
        self.version = 0
        self.context_length = 128
        self.vocabulary_size = 64
        self.takes_constraints = False
        # Version, tensors that changed, and how many of them came element by element.
        self.swaps: list[tuple[int, list[str], int]] = []
        self.breaks: Callable[[dict[str, Tensor]], None] = lambda weights: None

    def check(self, request: GenerateRequest) -> None:
        raise NotImplementedError

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Generation]:
        raise NotImplementedError

    def progress(self, request_ids: Collection[str]) -> int:
        return 0

    async def abort(self, request_ids: Sequence[str]) -> None:
        raise NotImplementedError

    async def swap(
        self,
        updates: Mapping[str, Update],
        version: int,
        mode: UpdateMode,
        canary: Canary | None = None,
    ) -> float:
        sparse = 0
        for name, update in updates.items():
            if isinstance(update, ChangedElements):
                self.weights[name].reshape(-1)[update.positions] = update.values
                sparse += 1
            else:
                self.weights[name] = update.copy()
        self.breaks(self.weights)
        if canary is not None:
            prove(canary, version, logprobs_of(self.weights))
        self.version = version
        self.swaps.append((version, sorted(updates), sparse))
        return 0.001

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0, 0.0, 0, 0.0)

    async def load(self) -> EngineLoad:
        return EngineLoad(0.0, 0, 0)

    async def close(self) -> None:
        return


def publisher(incarnation: int = 1, **weights: Any) -> WeightPublisher:
    telemetry = TelemetryConfig(log_level="error")
    return WeightPublisher(RUN, incarnation, WeightsConfig(**weights), OPEN, telemetry)


@asynccontextmanager
async def node(
    address: str,
    engine: Engine,
    initial: Mapping[str, Tensor] | None = None,
    node_id: str = "node",
    relay: Relay | None = None,
) -> AsyncIterator[PolicyReceiver]:
    """A receiver that runs for the duration of the context."""
    async with rpc.connect(address, OPEN) as channel:
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


class Gate(pb_grpc.WeightBroadcastServicer):
    """Stands between the publisher and the fleet.

    Args:
        bytes_per_second: Of every flow of payload; by default as fast as it comes.

    Attributes:
        passed: Payload bytes so far.
    """

    def __init__(self, channel: grpc.aio.Channel, bytes_per_second: float = np.inf) -> None:
        self._stub: Any = pb_grpc.WeightBroadcastStub(channel)
        self._bytes_per_second = bytes_per_second
        self.passed = 0

    async def Subscribe(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for announcement in self._stub.Subscribe(request):
            yield announcement

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        try:
            async for part in self._stub.Fetch(request):
                await asyncio.sleep(len(part.data) / self._bytes_per_second)
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

    async def ListNodes(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._stub.ListNodes(request)


@asynccontextmanager
async def serving(servicer: Any) -> AsyncIterator[str]:
    """Serves WeightBroadcast for the duration of the context; yields its address."""

    async def add(server: rpc.Server) -> None:
        name = pb.DESCRIPTOR.services_by_name["WeightBroadcast"].full_name
        await server.add(pb_grpc.add_WeightBroadcastServicer_to_server, servicer, name)

    async with rpc.serve("127.0.0.1:0", OPEN, add) as server:
        yield server.address


class Fleet:
    """Relaying nodes, each of which can be killed; a context manager."""

    def __init__(self, address: str, chunk_bytes: int) -> None:
        self._address = address
        self._config = WeightsConfig(relay_address="127.0.0.1:0", chunk_bytes=chunk_bytes)
        self._stacks: dict[int, AsyncExitStack] = {}
        self.engines: dict[int, MemoryEngine] = {}
        self.receivers: dict[int, PolicyReceiver] = {}

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: Any) -> None:
        for number in list(self._stacks):
            await self.kill(number)

    async def add(self, number: int, weights: Mapping[str, Tensor] | None) -> None:
        """A node that has loaded the given weights, or none."""
        stack = self._stacks[number] = AsyncExitStack()
        relay = await stack.enter_async_context(relaying(self._config, OPEN))
        engine = self.engines[number] = MemoryEngine(weights)
        own = None if weights is None else {name: t.copy() for name, t in weights.items()}
        member = node(self._address, engine, own, f"n{number:02}", relay)
        self.receivers[number] = await stack.enter_async_context(member)

    async def kill(self, number: int) -> None:
        await self._stacks.pop(number).aclose()
        del self.engines[number], self.receivers[number]

    async def all_at(self, version: int, deadline_seconds: float) -> None:
        await asyncio.gather(
            *(r.wait_for(version, deadline_seconds) for r in self.receivers.values())
        )
