"""The broadcasting process; `WeightPublisher` starts it and speaks with it over its pipes.

In: one line of JSON a message, the `Setup` first, then snapshots. Out: the address that it serves
on, then for each snapshot its version, once announced, and the slots that are free again, and
metrics. It ends when its input does, or its parent, whose process id is its argument.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from leeway import rpc, telemetry
from leeway.config import SecurityConfig, TelemetryConfig, WeightsConfig
from leeway.orphans import end_with_parent
from leeway.v1 import weights_pb2 as pb
from leeway.v1 import weights_pb2_grpc as pb_grpc
from trainer_service.weight_broadcast.nodes import Nodes
from trainer_service.weight_broadcast.service import BroadcastService
from trainer_service.weight_broadcast.snapshots import SlotReader, Snapshot
from trainer_service.weight_broadcast.store import PolicyStore
from trainer_service.weight_broadcast.tree import RelayTree

_METRICS_SECONDS = 2.0
# A line describes every tensor of a policy.
_LONGEST_LINE = 64 << 20


async def main() -> None:
    end_with_parent(int(sys.argv[1]))
    lines = await _stdin()
    setup = json.loads(await lines.readline())
    weights = WeightsConfig.model_validate(setup["weights"])
    telemetry.setup(
        TelemetryConfig.model_validate(setup["telemetry"]), role="broadcast", run=setup["run_id"]
    )
    store = PolicyStore(
        setup["run_id"],
        setup["incarnation"],
        [SlotReader(descriptor) for descriptor in setup["slots"]],
        kept_versions=weights.kept_versions,
        anchor_every=weights.anchor_every,
    )
    nodes = Nodes(RelayTree(weights.relay_fanout), weights.kept_versions)
    service = BroadcastService(store, nodes, weights.chunk_bytes)

    async def add(server: rpc.Server) -> None:
        name = pb.DESCRIPTOR.services_by_name["WeightBroadcast"].full_name
        await server.add(pb_grpc.add_WeightBroadcastServicer_to_server, service, name)

    security = SecurityConfig.model_validate(setup["security"])
    async with rpc.serve(weights.address, security, add, grace_seconds=0.2) as server:
        _say(address=server.address)
        metrics = asyncio.create_task(_say_metrics(service))
        while line := await lines.readline():
            snapshot = Snapshot.from_json(json.loads(line))
            freed = await service.publish(snapshot)
            _say(announced=snapshot.version, freed=freed)
        metrics.cancel()


async def _say_metrics(service: BroadcastService) -> None:
    while True:
        await asyncio.sleep(_METRICS_SECONDS)
        _say(metrics=service.metrics())


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_LONGEST_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
