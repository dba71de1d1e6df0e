"""The WeightBroadcast service over a `PolicyStore`.

A policy is announced only when it is whole: encoded, hashed and on offer. Heavy work runs in a
thread; the store's state changes on the event loop alone.
"""

from __future__ import annotations

import asyncio
import time
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
        self._changed = asyncio.Event()
        self._composing = asyncio.Lock()
        self._metrics: dict[str, float] = {}
        self._served_bytes = 0

    async def publish(self, snapshot: Snapshot) -> list[int]:
        """Encodes, offers, announces; returns the slots that are free now."""
        started = time.monotonic()
        prepared = await asyncio.to_thread(self._store.prepare, snapshot)
        async with self._composing:
            freed = self._store.commit(prepared, self._nodes.in_use())
        self._wake()
        self._metrics |= {
            "published_version": snapshot.version,
            "full_bytes": len(prepared.policy.payload),
            "delta_bytes": prepared.link.nbytes if prepared.link is not None else 0,
            "changed_ratio": prepared.link.changed_ratio if prepared.link is not None else 0.0,
            "encode_seconds": time.monotonic() - started,
        }
        log.info("policy announced", digest=prepared.policy.digest, **self._metrics)
        return freed

    def metrics(self) -> dict[str, float]:
        """Of the last version, and of the fleet as it is now."""
        newest = self._store.newest
        lags = self._nodes.lags(newest.version) if newest is not None else []
        return self._metrics | {
            "nodes": len(lags),
            "lag_versions_max": max(lags, default=0),
            "lagging_nodes": self._nodes.lagging(newest.version) if newest is not None else 0,
            "served_bytes": self._served_bytes,
        }

    async def Subscribe(  # noqa: N802
        self, request: pb.SubscribeRequest, context: Any
    ) -> AsyncIterator[pb.SubscribeResponse]:
        node = self._nodes.subscribed(request)
        # Others may have to fetch from somebody else now, here and below.
        self._wake()
        said = None
        try:
            while True:
                changed = self._changed
                announcement = self._announcement(self._nodes.parent(node.node_id))
                if announcement != said:
                    said = announcement
                    yield announcement
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        await changed.wait()
                except TimeoutError:
                    said = None
        finally:
            self._nodes.unsubscribed(node)
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _announcement(self, parent: str) -> pb.SubscribeResponse:
        response = pb.SubscribeResponse(
            run_id=self._store.run_id, incarnation=self._store.incarnation, parent=parent
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
            self._served_bytes += len(part)
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

    async def Reparent(  # noqa: N802
        self, request: pb.ReparentRequest, context: Any
    ) -> pb.ReparentResponse:
        self._nodes.reparented(request)
        parent = self._nodes.parent(request.node_id)
        log.warning("a relay failed", node=request.node_id, failed=request.failed, parent=parent)
        self._wake()
        return pb.ReparentResponse(parent=parent)

    async def ListNodes(  # noqa: N802
        self, request: pb.ListNodesRequest, context: Any
    ) -> pb.ListNodesResponse:
        newest = self._store.newest
        return pb.ListNodesResponse(
            version=newest.version if newest is not None else 0, nodes=self._nodes.rows()
        )
