"""The queue's service with nothing in it: pushes go into a Redis stream, batches come out of it.

It validates nothing, keeps no books, and acknowledges what it reads at once. `queue_costs.py`
measures it beside the real one: this is the price of the way, which every service of gRPC in Python
before Redis pays.

    REDIS_URL=... python bare_queue.py ADDRESS GROUP_SIZE
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from leeway import rpc
from leeway.config import SecurityConfig
from leeway.process import keep_freed_memory
from leeway.v1 import queue_pb2 as pb
from leeway.v1 import queue_pb2_grpc
from trajectory_queue.store import connect

_STREAM, _READERS = "bare", "readers"
# As many groups as the real one reads at once, about.
_CHUNK = 16


class BareQueue(queue_pb2_grpc.TrajectoryQueueServicer):
    def __init__(self, url: str, group_size: int) -> None:
        self._redis = connect(url)
        self._group_size = group_size

    async def Push(self, request: pb.PushRequest, _context: Any) -> pb.PushResponse:  # noqa: N802
        payloads = [pushed.trajectory for pushed in request.trajectories]
        async with self._redis.pipeline(transaction=False) as pipe:
            for start in range(0, len(payloads), self._group_size):
                group = payloads[start : start + self._group_size]
                pipe.xadd(_STREAM, dict(enumerate(group)))
            await pipe.execute()
        return pb.PushResponse()

    async def LeaseBatch(  # noqa: N802
        self, request: pb.LeaseBatchRequest, _context: Any
    ) -> AsyncIterator[pb.LeaseBatchResponse]:
        left = request.groups
        while left:
            count = min(left, _CHUNK)
            # redis-py names every form that a reply may have.
            read: Any = await self._redis.xreadgroup(_READERS, "one", {_STREAM: ">"}, count=count)
            ((_, entries),) = read
            identifiers = [identifier for identifier, _ in entries]
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.xack(_STREAM, _READERS, *identifiers)
                pipe.xdel(_STREAM, *identifiers)
                await pipe.execute()
            yield pb.LeaseBatchResponse(
                leased=[pb.LeasedGroup(trajectories=fields.values()) for _, fields in entries]
            )
            left -= len(entries)

    async def serve(self, address: str) -> None:
        await self._redis.xgroup_create(_STREAM, _READERS, mkstream=True)

        async def setup(server: rpc.Server) -> None:
            register = queue_pb2_grpc.add_TrajectoryQueueServicer_to_server
            await server.add(register, self, "bare")

        async with rpc.serve(address, SecurityConfig(), setup):
            print("ready", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    keep_freed_memory()
    uvloop.run(BareQueue(os.environ["REDIS_URL"], int(sys.argv[2])).serve(sys.argv[1]))
