"""The WeightBroadcast service over a `PolicyStore`.

A policy is announced only when it is whole: encoded, hashed and on offer. Heavy work runs in a
thread; the store's state changes on the event loop alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from leeway.manifests import chunk
from leeway.v1 import weights_pb2 as pb
from leeway.v1 import weights_pb2_grpc as pb_grpc
from trainer_service.weight_broadcast.nodes import Nodes
from trainer_service.weight_broadcast.snapshots import Snapshot
from trainer_service.weight_broadcast.store import Offer, PolicyStore

log = structlog.get_logger(__name__)

# A subscriber hears something at least so often.
HEARTBEAT_SECONDS = 10.0


class BroadcastService(pb_grpc.WeightBroadcastServicer):
    """See the module."""

    def __init__(self, store: PolicyStore, nodes: Nodes, chunk_bytes: int) -> None:
        self._store = store
        self._nodes = nodes
        self._chunk_bytes = chunk_bytes
        self._announced = asyncio.Event()
        self._composing = asyncio.Lock()

    async def publish(self, snapshot: Snapshot) -> list[int]:
        """Encodes, offers, announces; returns the slots that are free now."""
        prepared = await asyncio.to_thread(self._store.prepare, snapshot)
        async with self._composing:
            freed = self._store.commit(prepared, self._nodes.in_use())
        self._announced.set()
        self._announced = asyncio.Event()
        log.info(
            "policy announced",
            version=snapshot.version,
            digest=prepared.policy.digest,
            full_bytes=len(prepared.policy.payload),
            delta_bytes=len(prepared.link.delta.payload) if prepared.link is not None else None,
        )
        return freed

    async def Subscribe(  # noqa: N802
        self, request: pb.SubscribeRequest, context: Any
    ) -> AsyncIterator[pb.SubscribeResponse]:
        node = self._nodes.subscribed(request)
        try:
            while True:
                announced = self._announced
                yield self._announcement()
                try:
                    await asyncio.wait_for(announced.wait(), HEARTBEAT_SECONDS)
                except TimeoutError:
                    continue
        finally:
            self._nodes.unsubscribed(node)

    def _announcement(self) -> pb.SubscribeResponse:
        response = pb.SubscribeResponse(
            run_id=self._store.run_id, incarnation=self._store.incarnation
        )
        if (newest := self._store.newest) is not None:
            response.version = newest.version
            response.digest = newest.digest
        return response

    async def GetManifest(  # noqa: N802
        self, request: pb.GetManifestRequest, context: Any
    ) -> pb.GetManifestResponse:
        offer = await self._offer(request.base_digest)
        if offer is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no policy has been published yet")
            raise AssertionError("abort raises")
        return offer.manifest

    async def _offer(self, base_digest: str) -> Offer | None:
        if (offer := self._delta(base_digest)) is not None:
            return offer
        # One at a time: nodes that lag together ask for the same sum.
        async with self._composing:
            if (offer := self._delta(base_digest)) is not None:
                return offer
            offer = await asyncio.to_thread(self._store.compose, base_digest)
            if offer is None:
                return self._store.full()
            self._store.remember(offer)
            return offer

    def _delta(self, base_digest: str) -> Offer | None:
        newest = self._store.newest
        if newest is None or not base_digest:
            return None
        return self._store.known(newest.digest, base_digest)

    async def Fetch(  # noqa: N802
        self, request: pb.FetchRequest, context: Any
    ) -> AsyncIterator[pb.FetchResponse]:
        offer = self._store.known(request.digest, request.base_digest)
        if offer is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this payload is not on offer any more")
            return
        for offset in range(request.offset, len(offer.payload), self._chunk_bytes):
            part = self._store.read(offer, offset, self._chunk_bytes)
            if part is None:
                await context.abort(
                    grpc.StatusCode.NOT_FOUND, "this payload is not on offer any more"
                )
                return
            yield chunk(part, offset)

    async def Report(  # noqa: N802
        self, request: pb.ReportRequest, context: Any
    ) -> pb.ReportResponse:
        self._nodes.reported(request)
        if request.state == pb.NODE_STATE_FAILED:
            log.error(
                "a node refuses a policy",
                node=request.node_id,
                version=request.version,
                reason=request.message,
            )
        return pb.ReportResponse()

    async def ListNodes(  # noqa: N802
        self, request: pb.ListNodesRequest, context: Any
    ) -> pb.ListNodesResponse:
        newest = self._store.newest
        return pb.ListNodesResponse(
            version=newest.version if newest is not None else 0, nodes=self._nodes.rows()
        )
