"""Real rollout nodes, each a process of its own, under a trainer's publisher and a queue."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fleet import OPEN, RUN, Gate, serving
from leeway import config as configuration
from leeway import rpc
from leeway.config import TrainerConfig, WeightsConfig
from leeway.local import free_addresses
from leeway.manifests import Canary
from leeway.trajectory import Sampling, Task
from tests import tiny
from tests.weights.support import DEADLINE, publisher
from trainer_service.backends.torch_backend import TorchBackend
from trainer_service.canary import CanaryText
from trainer_service.weight_broadcast import WeightPublisher
from trainer_service.weight_broadcast.listing import NodeRow, list_nodes
from trajectory_queue.client import TrainerQueue
from trajectory_queue.main import serve

# A node loads torch and a model before it does anything.
START_SECONDS = 120.0


class Policies:
    """Models of one architecture; number 0 is the one that nodes load."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._text = CanaryText(self.model(0), WeightsConfig(canary_tolerance=1e-3))

    def model(self, number: int) -> Path:
        path = self._directory / f"model-{number}"
        return path if path.exists() else tiny.build(path, seed=number)

    def publish(
        self, broadcast: WeightPublisher, version: int, canary_of: int | None = None
    ) -> None:
        """`canary_of`: the canary is that of another policy, as if engines held that one."""
        backend = self._backend(version)
        canary = self.canary(version if canary_of is None else canary_of)
        broadcast.publish(version, backend.weights(), canary)
        broadcast.wait_announced(version, DEADLINE)

    def canary(self, number: int) -> Canary:
        return self._text.score(self._backend(number))

    def _backend(self, number: int) -> TorchBackend:
        return TorchBackend(self.model(number), TrainerConfig())


class Cluster:
    """Nodes, and the queue that they work for."""

    def __init__(self, directory: Path, weights_address: str, queue_address: str, model: Path):
        self._directory = directory
        self._path = directory / "run.yaml"
        self._nodes: dict[str, asyncio.subprocess.Process] = {}
        (directory / "rewards.py").write_text("def reward(completion, **_): return len(completion)")
        (directory / "rows.jsonl").write_text('{"prompt": "say a"}')
        settings = {
            "run": {"name": RUN, "directory": str(directory / "runs")},
            "model": {"path": str(model)},
            "task": {
                "jsonl": str(directory / "rows.jsonl"),
                "reward": f"{directory / 'rewards.py'}:reward",
            },
            "sampling": {"group_size": 2, "max_new_tokens": 100},
            "staleness": {"budget": 20},
            "trainer": {"batch_groups": 2},
            "rollout": {"concurrency": 8},
            "queue": {"address": queue_address},
            "weights": {"address": weights_address, "chunk_bytes": 4096},
        }
        self._path.write_text(json.dumps(settings))
        self.config = configuration.load(self._path)

    def said(self, name: str) -> str:
        """What a node has logged."""
        return (self._directory / f"{name}.log").read_text()

    async def until(self, rows_are: Callable[[list[NodeRow]], bool], address: str) -> list[NodeRow]:
        """Waits for a state of all nodes, none of which may end meanwhile."""
        rows: list[NodeRow] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                while not any(p.returncode is not None for p in self._nodes.values()):
                    _, rows = await list_nodes(address, OPEN)
                    if rows_are(rows):
                        return rows
                    await asyncio.sleep(0.05)
        raise AssertionError(f"{rows}\n" + "\n".join(self.said(name) for name in self._nodes))

    @asynccontextmanager
    async def node(self, name: str, *overrides: str) -> AsyncIterator[asyncio.subprocess.Process]:
        with (self._directory / f"{name}.log").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "leeway.cli", "rollout", str(self._path)),
                *("--node-id", name, *overrides),
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        self._nodes[name] = process
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    @asynccontextmanager
    async def queue(self) -> AsyncIterator[TrainerQueue]:
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        serving = asyncio.create_task(serve(self.config, stop=stop, on_ready=address.set_result))
        try:
            async with asyncio.timeout(START_SECONDS):
                await address
            async with rpc.connect(self.config.queue.address, OPEN) as channel:
                queue = TrainerQueue(channel, "trainer")
                await queue.resume(0)
                yield queue
        finally:
            stop.set()
            await serving


def all_at(version: int, count: int) -> Callable[[list[NodeRow]], bool]:
    return lambda rows: [(r.version, r.state) for r in rows] == [(version, "applied")] * count


@pytest.mark.slow
async def test_a_later_node_gets_its_weights_from_another(tmp_path: Path) -> None:
    policies = Policies(tmp_path)
    relays = "weights.relay_address=127.0.0.1:0"
    async with AsyncExitStack() as stack:
        broadcast = stack.enter_context(publisher())
        channel = await stack.enter_async_context(rpc.connect(broadcast.address, OPEN))
        gate = Gate(channel)
        address = await stack.enter_async_context(serving(gate))
        cluster = Cluster(tmp_path, address, "127.0.0.1:1", policies.model(0))
        policies.publish(broadcast, 0)
        for name in "abc":
            await stack.enter_async_context(cluster.node(name, relays))
        rows = await cluster.until(all_at(0, 3), broadcast.address)
        assert gate.passed == 0
        assert sum(row.parent == "" for row in rows) == 1, "one fetches from the publisher"

        policies.publish(broadcast, 1)
        rows = await cluster.until(all_at(1, 3), broadcast.address)
        assert gate.passed == rows[0].bytes_received, "one copy for three nodes"

        # What it has loaded is no version that the publisher knows: full weights, from a node.
        before = gate.passed
        await stack.enter_async_context(
            cluster.node("late", relays, f"model.path={policies.model(9)}")
        )
        rows = await cluster.until(all_at(1, 4), broadcast.address)
        (late,) = (row for row in rows if row.node_id == "late")
        assert late.parent and late.bytes_received > 0
        assert gate.passed == before


@pytest.mark.slow
async def test_a_node_with_wrong_weights_stops_and_nothing_that_they_sampled_is_queued(
    tmp_path: Path,
) -> None:
    policies = Policies(tmp_path)
    sampling = Sampling(max_new_tokens=100)
    tasks = [
        Task(f"t{i}", i, ({"role": "user", "content": f"{i}"},), {}, 2, sampling, seed=i)
        for i in range(30)
    ]
    (queue_address,) = free_addresses(1)
    with publisher() as broadcast:
        cluster = Cluster(tmp_path, broadcast.address, queue_address, policies.model(0))
        policies.publish(broadcast, 0)
        async with cluster.queue() as queue, cluster.node("node") as process:
            await queue.enqueue(tasks)
            async with asyncio.timeout(START_SECONDS):
                while (await queue.status()).groups["queued"] < 3:
                    assert process.returncode is None, cluster.said("node")
                    await asyncio.sleep(0.01)
                policies.publish(broadcast, 1, canary_of=2)
                assert await process.wait() == 1, cluster.said("node")
            assert "canary's log-probabilities differ" in cluster.said("node")
            queued = (await queue.status()).groups["queued"]
            assert 3 <= queued < len(tasks)
            batch = await queue.lease_batch(version=0, groups=queued, deadline_seconds=DEADLINE)
            sampled = {
                version
                for group in batch.groups
                for trajectory in group.trajectories
                for version, _ in trajectory.versions
            }
            assert sampled == {0}
            _, (row,) = await list_nodes(broadcast.address, OPEN)
            assert (row.version, row.state, row.connected) == (1, "failed", False)


def test_the_canary_is_that_of_the_published_values(tmp_path: Path) -> None:
    """bf16 values in float32: another policy's differ by far more than the tolerance."""
    policies = Policies(tmp_path)
    own, other = policies.canary(0), policies.canary(1)
    assert own.token_ids.size == 8 and np.isfinite(own.logprobs).all()
    assert own.deviation(policies.canary(0).logprobs) == 0.0
    assert own.deviation(other.logprobs) > 100 * own.tolerance
