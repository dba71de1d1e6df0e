"""Whatever happens to the stream: nothing wrong is applied, and everything is recovered."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import xxhash

from benchmarks.fleet import OPEN, Gate, MemoryEngine, node, serving
from leeway import rpc
from leeway.manifests import Canary
from leeway.tensors import Tensor
from leeway.v1 import weights_pb2 as pb
from rollout_service import fetching, receiver
from tests.weights.support import DEADLINE, Trainer, publish, publisher, same

FAULTS = 1000


class FaultyGate(Gate):
    """Does something bad to every other call."""

    def __init__(self, channel: grpc.aio.Channel, seed: int) -> None:
        super().__init__(channel)
        self._random = random.Random(seed)
        self.faults: dict[str, int] = {}

    def _fault(self, *kinds: str) -> str:
        if self._random.random() < 0.5:
            return ""
        kind = self._random.choice(kinds)
        self.faults[kind] = self.faults.get(kind, 0) + 1
        return kind

    def _damaged(self, data: bytes) -> bytes:
        damaged = bytearray(data)
        for _ in range(self._random.randint(1, 3)):
            damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
        return bytes(damaged)

    async def Subscribe(  # noqa: N802
        self, request: pb.SubscribeRequest, context: Any
    ) -> AsyncIterator[pb.SubscribeResponse]:
        async for announcement in self._stub.Subscribe(request):
            kind = self._fault("announcement cut", "announcement damaged", "old incarnation")
            if kind == "announcement cut":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            if kind == "announcement damaged":
                wrong = pb.SubscribeResponse()
                wrong.CopyFrom(announcement)
                wrong.digest = self._damaged(announcement.digest.encode()).decode("latin-1")
                yield wrong
            if kind == "old incarnation":
                wrong = pb.SubscribeResponse()
                wrong.CopyFrom(announcement)
                wrong.incarnation -= 1
                yield wrong
            yield announcement

    async def GetManifest(  # noqa: N802
        self, request: pb.GetManifestRequest, context: Any
    ) -> pb.GetManifestResponse:
        response = await self._stub.GetManifest(request)
        kind = self._fault("manifest damaged", "manifest forged", "manifest cut")
        if kind == "manifest cut":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        if kind == "manifest damaged":
            response.manifest = self._damaged(response.manifest)
        if kind == "manifest forged":
            message = pb.Manifest.FromString(response.manifest)
            entry = self._random.choice(message.tensors)
            forge = self._random.choice(["changed", "offset", "length", "encoding"])
            setattr(entry, forge, self._random.choice([0, 1, 2, 3, 4]))
            response.manifest = message.SerializeToString()
            response.checksum = xxhash.xxh3_64_intdigest(response.manifest)
        return response

    async def Fetch(  # noqa: N802
        self, request: pb.FetchRequest, context: Any
    ) -> AsyncIterator[pb.FetchResponse]:
        chunks = [chunk async for chunk in self._stub.Fetch(request)]
        kind = self._fault(
            "chunk damaged", "chunk forged", "cut", "truncated", "reordered", "dropped", "doubled"
        )
        place = self._random.randrange(len(chunks))
        if kind == "chunk damaged":
            chunks[place].data = self._damaged(chunks[place].data)
        if kind == "chunk forged":
            chunks[place].data = self._damaged(chunks[place].data)
            chunks[place].checksum = xxhash.xxh3_64_intdigest(chunks[place].data)
        if kind == "truncated":
            chunks = chunks[:place]
        if kind == "reordered":
            self._random.shuffle(chunks)
        if kind == "dropped":
            del chunks[place]
        if kind == "doubled":
            chunks.insert(place, chunks[place])
        for index, chunk in enumerate(chunks):
            if kind == "cut" and index == place:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            yield chunk

    async def Report(  # noqa: N802
        self, request: pb.ReportRequest, context: Any
    ) -> pb.ReportResponse:
        if self._fault("report lost"):
            await context.abort(grpc.StatusCode.INTERNAL, "lost")
        response: pb.ReportResponse = await self._stub.Report(request)
        return response


class JudgingEngine(MemoryEngine):
    """Knows what every version must be."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__(weights)
        self.truth: dict[int, dict[str, Tensor]] = {}

    async def swap(
        self, updates: Any, version: int, mode: Any, canary: Canary | None = None
    ) -> float:
        seconds = await super().swap(updates, version, mode, canary)
        assert same(self.weights, self.truth[version])
        return seconds


async def test_a_thousand_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (receiver, fetching):
        monkeypatch.setattr(module, "FIRST_PAUSE", 0.001)
        monkeypatch.setattr(module, "LONGEST_PAUSE", 0.01)
    trainer = Trainer()
    engine = JudgingEngine(trainer.weights())
    with publisher(chunk_bytes=200) as broadcast:
        async with rpc.connect(broadcast.address, OPEN) as channel:
            gate = FaultyGate(channel, seed=3)
            async with (
                serving(gate) as address,
                node(address, engine, trainer.weights()) as follower,
            ):
                version = 0
                while sum(gate.faults.values()) < FAULTS:
                    engine.truth[version] = trainer.weights()
                    publish(broadcast, version, trainer)
                    await follower.wait_for(version, DEADLINE)
                    assert same(engine.weights, trainer.weights())
                    trainer.step()
                    version += 1
    assert len(gate.faults) == 14 and min(gate.faults.values()) > 5, gate.faults
