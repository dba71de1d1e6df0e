"""A fleet with a relay tree: one copy leaves the publisher, whoever dies meanwhile."""

from __future__ import annotations

import asyncio

from benchmarks.fleet import OPEN, Fleet, Gate, serving
from leeway import rpc
from leeway.v1 import weights_pb2 as pb
from tests.weights.support import DEADLINE, Trainer, publish, publisher, same

NODES = 12


async def _all_at(fleet: Fleet, version: int, trainer: Trainer) -> None:
    await fleet.all_at(version, DEADLINE)
    assert all(same(engine.weights, trainer.weights()) for engine in fleet.engines.values())


async def test_one_copy_leaves_the_publisher() -> None:
    trainer = Trainer(scale=4)
    with publisher(relay_fanout=3) as broadcast:
        async with rpc.connect(broadcast.address, OPEN) as channel:
            gate = Gate(channel)
            async with serving(gate) as address, Fleet(address, chunk_bytes=1024) as fleet:
                for number in range(NODES):
                    await fleet.add(number, trainer.weights())
                publish(broadcast, 0, trainer)
                await _all_at(fleet, 0, trainer)
                assert gate.passed == 0

                for version in range(1, 6):
                    trainer.step()
                    publish(broadcast, version, trainer)
                    await _all_at(fleet, version, trainer)
                copies = gate.passed / await _bytes_received(gate, 5)
                assert 1.0 <= copies / 5 < 1.5, "so many deltas left the publisher per version"

                # The head of the tree and one below it die; the rest goes on.
                for number in (0, 4):
                    await fleet.kill(number)
                trainer.step()
                publish(broadcast, 6, trainer)
                await _all_at(fleet, 6, trainer)

                # Late joiners get full weights from those who have them.
                full = sum(tensor.nbytes for tensor in trainer.weights().values())
                before = gate.passed
                for number in range(20, 24):
                    await fleet.add(number, None)
                await _all_at(fleet, 6, trainer)
                assert gate.passed - before < 2.5 * full


async def _bytes_received(gate: Gate, version: int) -> float:
    """Payload bytes of a node's update to a version, on average, once all have reported it."""
    async with asyncio.timeout(DEADLINE):
        while True:
            rows = (await gate.ListNodes(pb.ListNodesRequest(), None)).nodes
            if all((row.version, row.state) == (version, pb.NODE_STATE_APPLIED) for row in rows):
                return float(sum(row.bytes_received for row in rows) / len(rows))
            await asyncio.sleep(0.01)
