"""Where a node's weights come from: its parent in the relay tree, or the publisher.

A transfer that breaks goes on where it broke, from whomever: a parent that does not answer is
replaced at once, by the publisher's word; one that has not got a delta from what is held is passed
over this time. Where the publisher has none either, full weights come from the parent. The
publisher itself is tried again until the deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import structlog
from prometheus_client import Counter

from leeway import rpc
from leeway.errors import InfrastructureError, WireError
from leeway.manifests import Manifest, check_chunk, unseal
from leeway.v1 import weights_pb2 as pb
from leeway.v1 import weights_pb2_grpc as pb_grpc
from rollout_service.parcels import Parcel, Shelf

log = structlog.get_logger(__name__)

_RECEIVED = Counter(
    "leeway_weights_received_bytes_total", "Payload bytes received, by who sent them", ["source"]
)
_BROKEN = Counter(
    "leeway_weights_broken_transfers_total", "Transfers that had to go on or elsewhere"
)

# The publisher may take as long to answer, and between two chunks; a parent less.
PUBLISHER_SECONDS = 60.0
PARENT_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
# So many parents in a row may fail a transfer before the publisher is asked.
_MOST_PARENTS = 4


class Fetcher:
    """Brings payloads onto the shelf.

    Args:
        publisher: The WeightBroadcast stub of the publisher.
        connect: Dials another node; without it all comes from the publisher.
    """

    def __init__(
        self,
        publisher: Any,
        shelf: Shelf,
        node_id: str,
        run_id: str,
        connect: Callable[[str], grpc.aio.Channel] | None,
    ) -> None:
        self._publisher = publisher
        self._shelf = shelf
        self._node_id = node_id
        self._run_id = run_id
        self._connect = connect
        self._parent = ""
        self._channel: grpc.aio.Channel | None = None

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def fetch(self, target: pb.SubscribeResponse, base_digest: str) -> Parcel:
        """A whole parcel that leads from the base towards the target, or full weights.

        Raises:
            InfrastructureError: it did not come.
            WireError: the publisher refuses, or sends what makes no sense.
        """
        parent = target.parent
        for _ in range(_MOST_PARENTS):
            if not parent or self._connect is None:
                break
            try:
                return await self._from_parent(parent, target, base_digest)
            except WireError as error:
                log.info("a relay has not got it", relay=parent, cause=str(error))
                break
            except InfrastructureError as error:
                _BROKEN.inc()
                log.warning("a relay does not answer", relay=parent, cause=str(error))
                response = await rpc.call(
                    self._publisher.Reparent,
                    pb.ReparentRequest(node_id=self._node_id, failed=parent),
                    what="another relay",
                    deadline_seconds=PUBLISHER_SECONDS,
                )
                parent = response.parent
        return await self._from_publisher(target, base_digest, parent)

    async def _from_parent(
        self, parent: str, target: pb.SubscribeResponse, base_digest: str
    ) -> Parcel:
        assert self._connect is not None
        if parent != self._parent:
            await self.close()
            self._parent, self._channel = parent, self._connect(parent)
        stub: Any = pb_grpc.WeightBroadcastStub(self._channel)
        request = self._manifest_request(target, base_digest)
        try:
            sealed = await stub.GetManifest(request, timeout=PARENT_SECONDS)
            parcel = self._parcel(sealed, target, base_digest)
            await self._receive(stub, parcel, PARENT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise rpc.translate(error, f"fetch from {parent}") from error
        return parcel

    async def _from_publisher(
        self, target: pb.SubscribeResponse, base_digest: str, parent: str
    ) -> Parcel:
        sealed = await rpc.call(
            self._publisher.GetManifest,
            self._manifest_request(target, base_digest),
            what=f"manifest of version {target.version}",
            deadline_seconds=PUBLISHER_SECONDS,
        )
        if base_digest and parent and self._connect is not None and unseal(sealed).full:
            try:
                return await self._from_parent(parent, target, "")
            except (WireError, InfrastructureError) as error:
                log.info("a relay has no full weights either", relay=parent, cause=str(error))
        parcel = self._parcel(sealed, target, base_digest)
        what = f"version {parcel.manifest.version} from the publisher"
        end, pause = time.monotonic() + PUBLISHER_SECONDS, FIRST_PAUSE
        while not parcel.whole:
            before = parcel.received
            problem: Exception
            try:
                await self._receive(self._publisher, parcel, PUBLISHER_SECONDS)
                continue
            except grpc.aio.AioRpcError as error:
                problem = rpc.translate(error, what)
                if not isinstance(problem, InfrastructureError):
                    raise problem from error
            except (WireError, InfrastructureError) as error:
                problem = error
            if parcel.received > before:
                end, pause = time.monotonic() + PUBLISHER_SECONDS, FIRST_PAUSE
            if time.monotonic() > end:
                raise InfrastructureError(
                    f"{what}: stuck at {parcel.received} of {parcel.payload.size} bytes: {problem}"
                )
            _BROKEN.inc()
            log.info("a transfer goes on", at=parcel.received, cause=str(problem))
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return parcel

    def _manifest_request(
        self, target: pb.SubscribeResponse, base_digest: str
    ) -> pb.GetManifestRequest:
        return pb.GetManifestRequest(
            node_id=self._node_id, version=target.version, base_digest=base_digest
        )

    def _parcel(
        self, sealed: pb.GetManifestResponse, target: pb.SubscribeResponse, base_digest: str
    ) -> Parcel:
        """A parcel to fill: the one that a broken transfer left, or a new one."""
        manifest = unseal(sealed)
        self._check(manifest, target, base_digest)
        known = self._shelf.find(manifest.digest, manifest.base_digest)
        if known is not None and not known.failed and known.sealed == sealed:
            return known
        parcel = Parcel(manifest, sealed)
        self._shelf.put(parcel)
        return parcel

    def _check(self, manifest: Manifest, target: pb.SubscribeResponse, base_digest: str) -> None:
        if manifest.run_id != self._run_id or manifest.base_digest not in ("", base_digest):
            raise WireError(
                f"manifest of run {manifest.run_id!r} on base {manifest.base_digest!r}, asked for "
                f"{self._run_id!r} on {base_digest!r}"
            )
        announced = (target.incarnation, target.version)
        if (manifest.incarnation, manifest.version) == announced and (
            manifest.digest != target.digest
        ):
            raise WireError(f"manifest of version {target.version}: another digest than announced")

    async def _receive(self, stub: Any, parcel: Parcel, silence_seconds: float) -> None:
        """The rest of a payload, as far as it comes.

        Raises:
            InfrastructureError: silence.
            WireError: a chunk is damaged or out of place, or the stream ends too early.
        """
        request = pb.FetchRequest(
            node_id=self._node_id,
            digest=parcel.manifest.digest,
            base_digest=parcel.manifest.base_digest,
            offset=parcel.received,
        )
        received = _RECEIVED.labels("publisher" if stub is self._publisher else "relay")
        call = stub.Fetch(request)
        try:
            while not parcel.whole:
                async with asyncio.timeout(silence_seconds):
                    response = await call.read()
                if response is grpc.aio.EOF:
                    raise WireError(f"a payload that ends at {parcel.received} bytes")
                room = parcel.payload.size - parcel.received
                data = check_chunk(response, parcel.received, room)
                parcel.add(data)
                received.inc(len(data))
        except TimeoutError as error:
            raise InfrastructureError(f"no chunk for {silence_seconds:g} s") from error
        finally:
            call.cancel()
