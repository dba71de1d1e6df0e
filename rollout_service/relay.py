"""A node serves the weights that it receives to others in its cluster.

It passes on what is on its shelf, from the first byte that arrives, so that a payload flows down
the tree while it is still coming in. It vouches for nothing: whoever fetches verifies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from leeway import rpc
from leeway.config import SecurityConfig, WeightsConfig
from leeway.manifests import chunk
from leeway.roles import NODE_NAME
from leeway.v1 import weights_pb2 as pb
from leeway.v1 import weights_pb2_grpc as pb_grpc
from rollout_service.parcels import Shelf

# How long a child's question may wait for an answer that this node is itself about to get.
_MANIFEST_SECONDS = 5.0
_PROGRESS_SECONDS = 8.0


class RelayService(pb_grpc.WeightBroadcastServicer):
    """GetManifest and Fetch over a node's shelf."""

    def __init__(self, shelf: Shelf, chunk_bytes: int) -> None:
        self._shelf = shelf
        self._chunk_bytes = chunk_bytes

    async def GetManifest(  # noqa: N802
        self, request: pb.GetManifestRequest, context: Any
    ) -> pb.GetManifestResponse:
        parcel = None
        if not request.base_digest:
            parcel = await self._shelf.full(request.version)
        if parcel is None:
            parcel = await self._shelf.wait_leading_to(
                request.version, request.base_digest, _MANIFEST_SECONDS
            )
        if parcel is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this relay does not have it")
            raise AssertionError("abort raises")
        return parcel.sealed

    async def Fetch(  # noqa: N802
        self, request: pb.FetchRequest, context: Any
    ) -> AsyncIterator[pb.FetchResponse]:
        parcel = self._shelf.find(request.digest, request.base_digest)
        if parcel is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this relay does not have it")
            return
        offset = request.offset
        while offset < parcel.payload.size:
            if not await parcel.beyond(offset, _PROGRESS_SECONDS):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "this relay is stuck itself")
                return
            end = min(parcel.received, offset + self._chunk_bytes)
            yield chunk(parcel.payload[offset:end].data, offset)
            offset = end


@dataclass(frozen=True, slots=True, eq=False)
class Relay:
    """A node's place in the tree.

    Attributes:
        shelf: The node's receiver fills it.
        address: Where others fetch from it.
        connect: Dials another node.
    """

    shelf: Shelf
    address: str
    connect: Callable[[str], grpc.aio.Channel]


@asynccontextmanager
async def relaying(config: WeightsConfig, security: SecurityConfig) -> AsyncIterator[Relay | None]:
    """Serves for the duration of the context, if the configuration gives the node an address to.

    Raises:
        ConfigError: the address cannot be bound, or is neither loopback nor secured.
    """
    if config.relay_address is None:
        yield None
        return
    shelf = Shelf()
    service = RelayService(shelf, config.chunk_bytes)

    async def add(server: rpc.Server) -> None:
        name = pb.DESCRIPTOR.services_by_name["WeightBroadcast"].full_name
        await server.add(pb_grpc.add_WeightBroadcastServicer_to_server, service, name)

    async with rpc.serve(config.relay_address, security, add, grace_seconds=0.2) as server:
        # Another node is dialled by an address that no certificate can know.
        as_node = security.model_copy(update={"server_name": NODE_NAME})
        yield Relay(shelf, server.address, lambda address: rpc.connect(address, as_node))
