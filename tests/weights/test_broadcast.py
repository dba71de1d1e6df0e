"""From the trainer's publish to the engine's swap, with the real processes and gRPC between."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest
import structlog

from benchmarks.fleet import OPEN, MemoryEngine, node
from leeway.errors import LeewayError
from leeway.tensors import Tensor
from leeway.v1 import weights_pb2 as pb
from rollout_service.engines.base import CanaryError
from tests.waiting import eventually
from tests.weights.support import DEADLINE, Trainer, publish, publisher, same
from trainer_service.weight_broadcast import WeightPublisher
from trainer_service.weight_broadcast.listing import list_nodes
from trainer_service.weight_broadcast.nodes import Nodes
from trainer_service.weight_broadcast.tree import RelayTree


async def test_a_node_that_loaded_the_same_weights_fetches_nothing() -> None:
    trainer = Trainer()
    engine = MemoryEngine(trainer.weights())
    with publisher() as broadcast:
        publish(broadcast, 0, trainer)
        async with node(broadcast.address, engine, trainer.weights()) as receiver:
            await receiver.wait_for(0, DEADLINE)
    assert engine.swaps == [(0, [], 0)]


async def test_every_version_arrives_bit_for_bit() -> None:
    trainer = Trainer()
    engine = MemoryEngine(trainer.weights())
    with publisher() as broadcast:
        async with node(broadcast.address, engine, trainer.weights()) as receiver:
            for version in range(30):
                publish(broadcast, version, trainer)
                await receiver.wait_for(version, DEADLINE)
                assert same(engine.weights, trainer.weights())
                trainer.step(3e-6 if version % 3 else 1e-3)
    assert [version for version, _, _ in engine.swaps] == list(range(30))
    changed = [set(names) for _, names, _ in engine.swaps]
    assert not any("head.bias" in names for names in changed), "only what changed is swapped"
    assert {sparse > 0 for *_, sparse in engine.swaps} == {True, False}, "whole or by elements"


async def test_a_node_that_joins_late_or_lags_skips_versions() -> None:
    trainer = Trainer()
    first = trainer.weights()
    with publisher() as broadcast:
        for version in range(6):
            publish(broadcast, version, trainer)
            trainer.step()
        late, lagging = MemoryEngine(), MemoryEngine(first)
        publish(broadcast, 6, trainer)
        async with (
            node(broadcast.address, late, None, "late") as fresh,
            node(broadcast.address, lagging, first, "lagging") as behind,
        ):
            await fresh.wait_for(6, DEADLINE)
            await behind.wait_for(6, DEADLINE)
    assert same(late.weights, trainer.weights())
    assert same(lagging.weights, trainer.weights())
    assert [version for version, _, _ in lagging.swaps] == [6], "composed to one delta"


async def test_full_weights_come_when_the_base_is_unknown() -> None:
    trainer = Trainer()
    engine = MemoryEngine(Trainer(seed=9).weights())
    with publisher() as broadcast:
        publish(broadcast, 3, trainer)
        async with node(broadcast.address, engine, Trainer(seed=9).weights()) as receiver:
            await receiver.wait_for(3, DEADLINE)
    assert same(engine.weights, trainer.weights())


async def test_a_killed_broadcaster_is_started_again_and_nodes_go_on() -> None:
    trainer = Trainer()
    engine = MemoryEngine(trainer.weights())
    with publisher() as broadcast:
        async with node(broadcast.address, engine, trainer.weights()) as receiver:
            for version in range(4):
                publish(broadcast, version, trainer)
                await receiver.wait_for(version, DEADLINE)
                await _kill(broadcast)
                trainer.step()
            publish(broadcast, 4, trainer)
            await receiver.wait_for(4, DEADLINE)
            assert same(engine.weights, trainer.weights())
    assert all("head.bias" not in names for _, names, _ in engine.swaps), "by deltas, not in full"


async def test_a_new_incarnation_takes_over() -> None:
    trainer = Trainer()
    engine = MemoryEngine(trainer.weights())
    with publisher(incarnation=1) as first:
        address = first.address
        async with node(address, engine, trainer.weights()) as receiver:
            publish(first, 5, trainer)
            await receiver.wait_for(5, DEADLINE)
            checkpoint = trainer.weights()
            trainer.step()
            publish(first, 6, trainer)
            await receiver.wait_for(6, DEADLINE)
            await asyncio.to_thread(first.close)
            # It resumes from version 5; what version 6 was is lost, and must not be generated with.
            with publisher(incarnation=2, address=address) as second:
                second.publish(5, checkpoint.items())
                await eventually(lambda: engine.version == 5, "its version", DEADLINE)
                assert same(engine.weights, checkpoint)
                trainer = Trainer()
                trainer.step(1e-4)
                publish(second, 6, trainer)
                await eventually(lambda: receiver.version == 6, "its version", DEADLINE)
                assert same(engine.weights, trainer.weights())


async def test_an_engine_that_deviates_from_the_canary_stops_the_node() -> None:
    trainer = Trainer()
    engine = MemoryEngine(trainer.weights())
    with publisher() as broadcast:
        async with node(broadcast.address, engine, trainer.weights()) as receiver:
            publish(broadcast, 0, trainer)
            await receiver.wait_for(0, DEADLINE)
            engine.breaks = lambda weights: weights["norm.weight"].fill(0)
            trainer.step()
            publish(broadcast, 1, trainer)
            with pytest.raises(CanaryError, match="version 1"):
                await receiver.wait_for(1, DEADLINE)
            assert receiver.version == 0
            _, (row,) = await list_nodes(broadcast.address, OPEN)
            assert (row.version, row.state) == (1, "failed")
            assert "canary" in row.message


async def test_snapshots_that_come_faster_than_they_are_encoded_are_skipped() -> None:
    trainer = Trainer(scale=40)
    engine = MemoryEngine(trainer.weights())
    with publisher() as broadcast:
        async with node(broadcast.address, engine, trainer.weights()) as receiver:
            for version in range(40):
                broadcast.publish(version, trainer.weights().items(), trainer.canary())
                trainer.step()
            broadcast.publish(40, trainer.weights().items(), trainer.canary())
            await receiver.wait_for(40, DEADLINE)
    assert same(engine.weights, trainer.weights())


def test_versions_only_go_up_and_a_failed_snapshot_leaves_nothing() -> None:
    trainer = Trainer()
    with publisher() as broadcast:
        publish(broadcast, 2, trainer)
        with pytest.raises(ValueError, match="version 2"):
            broadcast.publish(2, trainer.weights().items())
        twice = [*trainer.weights().items()] * 2
        for _ in range(6):
            with pytest.raises(ValueError, match="twice"):
                broadcast.publish(3, twice)
        publish(broadcast, 3, trainer)


async def test_weights_of_another_run_are_refused() -> None:
    trainer = Trainer()
    with publisher() as broadcast:
        publish(broadcast, 0, trainer)
        async with node(broadcast.address, MemoryEngine()) as receiver:
            receiver._run_id = "another"
            with pytest.raises(LeewayError, match="another"):
                await receiver.wait_for(0, DEADLINE)


async def _kill(broadcast: WeightPublisher) -> None:
    pid = broadcast.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: broadcast.pid not in (pid, None), "its version", DEADLINE)


async def test_adapters_travel_whole_under_the_same_protocol() -> None:
    """A policy is the tensors it is published with: LoRA adapters alone as well as all weights."""
    random = np.random.default_rng(0)
    engine = MemoryEngine()

    def adapters() -> dict[str, Tensor]:
        shapes = {"q_proj.lora_A.weight": (8, 64), "q_proj.lora_B.weight": (64, 8)}
        return {name: random.normal(size=s).astype(np.float32) for name, s in shapes.items()}

    with publisher() as broadcast:
        async with node(broadcast.address, engine) as receiver:
            for version in range(3):
                policy = adapters()
                broadcast.publish(version, policy.items())
                await receiver.wait_for(version, DEADLINE)
                assert same(engine.weights, policy)


async def _applied(address: str, version: int) -> None:
    """Returns once the broadcaster knows that node `a` has the version."""
    wanted = (version, [("a", version, "applied", True, 0)])
    async with asyncio.timeout(DEADLINE):
        while True:
            newest, rows = await list_nodes(address, OPEN)
            found = [(r.node_id, r.version, r.state, r.connected, r.lag) for r in rows]
            if (newest, found) == wanted:
                return
            await asyncio.sleep(0.01)


async def test_the_listing_says_who_has_what() -> None:
    trainer = Trainer()
    with publisher() as broadcast:
        publish(broadcast, 4, trainer)
        async with node(broadcast.address, MemoryEngine(), node_id="a"):
            await _applied(broadcast.address, 4)


async def test_what_a_new_incarnation_announces_again_leaves_the_engine_alone() -> None:
    trainer = Trainer()
    engine = MemoryEngine()
    with publisher(incarnation=1) as first:
        address = first.address
        async with node(address, engine, node_id="a"):
            publish(first, 5, trainer)
            await _applied(address, 5)
            await asyncio.to_thread(first.close)
            with publisher(incarnation=2, address=address) as second:
                publish(second, 5, trainer)
                await _applied(address, 5)
                trainer.step()
                publish(second, 6, trainer)
                await _applied(address, 6)
    assert [version for version, _, _ in engine.swaps] == [5, 6]


def test_a_node_that_falls_behind_is_an_alarm_once() -> None:
    nodes = Nodes(RelayTree(4), most_behind=3)
    for name in ("far", "near"):
        nodes.subscribed(pb.SubscribeRequest(node_id=name, have_version=1))
    nodes.unsubscribed(nodes.subscribed(pb.SubscribeRequest(node_id="gone", have_version=1)))
    nodes.reported(pb.ReportRequest(node_id="near", version=5, state=pb.NODE_STATE_APPLIED))
    with structlog.testing.capture_logs() as logs:
        counts = [nodes.lagging(newest) for newest in (4, 5, 8, 9)]
    assert counts == [0, 1, 1, 2]
    assert [(line["event"], line["node"]) for line in logs] == [
        ("a node lags", "far"),
        ("a node lags", "near"),
    ]
