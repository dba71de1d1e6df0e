"""A fleet with a relay tree: one copy leaves the publisher, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
from support import DEADLINE, OPEN, MemoryEngine, Trainer, node, publish, publisher, same

from leeway import rpc
from leeway.config import WeightsConfig
from leeway.v1 import weights_pb2 as pb
from leeway.v1 import weights_pb2_grpc as pb_grpc
from rollout_service.receiver import PolicyReceiver
from rollout_service.relay import Relay, relaying

NODES = 12
RELAYS = WeightsConfig(relay_address="127.0.0.1:0", chunk_bytes=1024)


class Gate(pb_grpc.WeightBroadcastServicer):
    """Between the publisher and the fleet: counts the payload bytes that pass."""

    def __init__(self, address: str) -> None:
        self._channel = rpc.connect(address, OPEN)
        self._stub: Any = pb_grpc.WeightBroadcastStub(self._channel)
        self.passed = 0

    async def close(self) -> None:
        await self._channel.close()

    async def Subscribe(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for announcement in self._stub.Subscribe(request):
            yield announcement

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        try:
            async for part in self._stub.Fetch(request):
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


class Fleet:
    """Relaying nodes, each of which can be killed."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stacks: dict[int, AsyncExitStack] = {}
        self.engines: dict[int, MemoryEngine] = {}
        self.receivers: dict[int, PolicyReceiver] = {}

    async def add(self, number: int, trainer: Trainer | None) -> None:
        """A node that has loaded the trainer's weights, or none."""
        weights = trainer.weights() if trainer is not None else None
        stack = self._stacks[number] = AsyncExitStack()
        relay: Relay | None = await stack.enter_async_context(relaying(RELAYS, OPEN))
        self.engines[number] = MemoryEngine(weights)
        self.receivers[number] = await stack.enter_async_context(
            node(self._address, self.engines[number], weights, f"n{number:02}", relay)
        )

    async def kill(self, number: int) -> None:
        await self._stacks.pop(number).aclose()
        del self.engines[number], self.receivers[number]

    async def all_at(self, version: int, trainer: Trainer) -> None:
        receivers = self.receivers.values()
        await asyncio.gather(*(receiver.wait_for(version, DEADLINE) for receiver in receivers))
        assert all(same(engine.weights, trainer.weights()) for engine in self.engines.values())

    async def close(self) -> None:
        for number in list(self._stacks):
            await self.kill(number)


async def test_one_copy_leaves_the_publisher() -> None:
    trainer = Trainer(scale=4)
    with publisher(relay_fanout=3) as broadcast:
        gate = Gate(broadcast.address)

        async def add(server: rpc.Server) -> None:
            await server.add(
                pb_grpc.add_WeightBroadcastServicer_to_server, gate, "leeway.v1.WeightBroadcast"
            )

        async with rpc.serve("127.0.0.1:0", OPEN, add) as server:
            fleet = Fleet(server.address)
            try:
                await fleet.add(0, trainer)
                for number in range(1, NODES):
                    await fleet.add(number, trainer)
                publish(broadcast, 0, trainer)
                await fleet.all_at(0, trainer)
                assert gate.passed == 0

                for version in range(1, 6):
                    trainer.step()
                    publish(broadcast, version, trainer)
                    await fleet.all_at(version, trainer)
                deltas = gate.passed
                copies = deltas / await _bytes_received(gate, 5)
                assert 1.0 <= copies / 5 < 1.5, "so many deltas left the publisher per version"

                # The head of the tree and one below it die; the rest goes on.
                for number in (0, 4):
                    await fleet.kill(number)
                trainer.step()
                publish(broadcast, 6, trainer)
                await fleet.all_at(6, trainer)

                # Late joiners get full weights from those who have them.
                full = sum(tensor.nbytes for tensor in trainer.weights().values())
                before = gate.passed
                for number in range(20, 24):
                    await fleet.add(number, None)
                await fleet.all_at(6, trainer)
                assert gate.passed - before < 2.5 * full
            finally:
                await fleet.close()
        await gate.close()


async def _bytes_received(gate: Gate, version: int) -> float:
    """Payload bytes of a node's update to a version, on average, once all have reported it."""
    async with asyncio.timeout(DEADLINE):
        while True:
            rows = (await gate.ListNodes(pb.ListNodesRequest(), None)).nodes
            if all((row.version, row.state) == (version, pb.NODE_STATE_APPLIED) for row in rows):
                return float(sum(row.bytes_received for row in rows) / len(rows))
            await asyncio.sleep(0.01)
