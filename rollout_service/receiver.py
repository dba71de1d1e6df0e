"""New policies arrive here: pulled, staged, verified, then swapped into the engine.

The order is strict: fetch, stage and verify in host memory while the engine generates; then the
engine pauses, applies what changed, and proves it by the canary. `version` moves only after that.
Whatever goes wrong on the way in is tried again: a broken transfer goes on at its offset, a missing
base or a wrong digest brings full weights, a peer that is away is dialled again. What goes wrong
after the swap is not: a canary that deviates means that the engine does not hold the weights it was
given, and the node stops.

One task listens to announcements, one follows them, one reports; only the newest counts, so that
versions may skip.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import grpc
import structlog
from prometheus_client import Counter, Gauge, Histogram

from leeway import rpc
from leeway.config import UpdateMode, WeightsConfig
from leeway.errors import DeadlineError, InfrastructureError, LeewayError, WireError
from leeway.manifests import Manifest
from leeway.telemetry import Waits
from leeway.tensors import Tensor
from leeway.v1 import weights_pb2 as pb
from leeway.v1 import weights_pb2_grpc as pb_grpc
from rollout_service.engines.base import CanaryError, Engine
from rollout_service.fetching import FIRST_PAUSE, LONGEST_PAUSE, Fetcher
from rollout_service.host_copy import HostCopy
from rollout_service.parcels import Parcel, Shelf
from rollout_service.relay import Relay

log = structlog.get_logger(__name__)

_VERSION = Gauge("leeway_weights_version", "Version that the engine holds, verified")
_LAG = Gauge("leeway_weights_lag_versions", "Versions between the newest announced and that one")
_STAGE_SECONDS = Histogram(
    "leeway_weights_stage_seconds", "From an announcement to verified weights"
)
_PAUSE_SECONDS = Histogram("leeway_weights_pause_seconds", "Standstill of generation in an update")
_REFUSED = Counter(
    "leeway_weights_refused_total", "Updates that failed verification, by where", ["at"]
)

# The broadcaster speaks every 10 seconds; a connection that is silent for longer is given up.
_SILENCE_SECONDS = 30.0
_REPORT_SECONDS = 5.0


class PolicyReceiver:
    """Keeps an engine on the newest policy.

    Args:
        initial: The weights that the engine has loaded, under Hugging Face names; the receiver
            takes them over. Without them, or when the trainer's differ, full weights are fetched.
        run_id: Weights of another run are refused.
        relay: Takes part in the relay tree; without it all comes from the publisher.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        engine: Engine,
        *,
        node_id: str,
        run_id: str,
        mode: UpdateMode,
        config: WeightsConfig,
        initial: Mapping[str, Tensor] | None = None,
        relay: Relay | None = None,
        waits: Waits | None = None,
    ) -> None:
        self._stub: Any = pb_grpc.WeightBroadcastStub(channel)
        self._relay = relay
        self._cluster = config.cluster
        self._shelf = relay.shelf if relay is not None else Shelf()
        self._fetcher = Fetcher(
            self._stub, self._shelf, node_id, run_id, relay.connect if relay is not None else None
        )
        self._shelf.make_full = self._make_full
        self._engine = engine
        self._node_id = node_id
        self._run_id = run_id
        self._mode = mode
        self._initial = initial
        self._waits = waits or Waits()
        self._host = HostCopy()
        # What led to the weights held; and who may touch them.
        self._manifest: Manifest | None = None
        self._touching = asyncio.Lock()
        self._incarnation = -1
        self._version = -1
        self._failure: LeewayError | None = None
        self._refusal: pb.ReportRequest | None = None
        self._target: pb.SubscribeResponse | None = None
        self._changed = asyncio.Condition()
        self._reports: asyncio.Queue[pb.ReportRequest] = asyncio.Queue()

    @property
    def version(self) -> int:
        """The policy that the engine holds, verified; -1 before the first."""
        return self._version

    @property
    def digest(self) -> str:
        """Of the verified weights in host memory; empty while there are none."""
        return self._host.digest

    async def wait_for(self, version: int, deadline_seconds: float) -> None:
        """Waits until the engine generates with `version` or a newer one.

        Raises:
            DeadlineError: it does not in time.
            CanaryError, WireError: the receiver has stopped.
        """
        try:
            async with asyncio.timeout(deadline_seconds), self._changed:
                await self._changed.wait_for(
                    lambda: self._version >= version or self._failure is not None
                )
        except TimeoutError as error:
            raise DeadlineError(
                f"weights of version {version}: not within {deadline_seconds:g} s; the engine has "
                f"version {self._version}, announced is "
                f"{self._target.version if self._target is not None else 'nothing'}"
            ) from error
        if self._failure is not None:
            raise self._failure

    async def run(self) -> None:
        """Follows the broadcast until cancelled.

        Raises:
            CanaryError: the engine does not hold what it was given.
            WireError: the weights are another run's.
        """
        if self._initial is not None:
            await asyncio.to_thread(self._host.adopt, self._initial)
            self._initial = None
        loops = (self._listen(), self._follow(), self._report())
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except LeewayError as error:
            self._failure = error
            raise
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                await self._say_refusal()
            await self._fetcher.close()
            async with self._changed:
                self._changed.notify_all()

    # --- Announcements

    async def _listen(self) -> None:
        pause = FIRST_PAUSE
        while True:
            request = pb.SubscribeRequest(
                node_id=self._node_id,
                have_version=max(self._version, 0),
                have_digest=self._host.digest,
                relay_address=self._relay.address if self._relay is not None else "",
                cluster=self._cluster,
            )
            call = self._stub.Subscribe(request)
            try:
                while True:
                    async with asyncio.timeout(_SILENCE_SECONDS):
                        announcement = await call.read()
                    if announcement is grpc.aio.EOF:
                        break
                    pause = FIRST_PAUSE
                    await self._hear(announcement)
            except TimeoutError:
                log.warning("the weight broadcast is silent; subscribing again")
            except grpc.aio.AioRpcError as error:
                problem = rpc.translate(error, "subscribe to weights")
                if not isinstance(problem, InfrastructureError):
                    raise problem from error
                log.info("the weight broadcast is away", cause=str(problem))
            finally:
                call.cancel()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _hear(self, announcement: pb.SubscribeResponse) -> None:
        if announcement.run_id != self._run_id:
            raise WireError(
                f"weights of run {announcement.run_id!r}, but this node belongs to "
                f"{self._run_id!r}; check weights.address and run.name"
            )
        newest = self._target
        if not announcement.digest or (
            newest is not None and announcement.incarnation < newest.incarnation
        ):
            return
        async with self._changed:
            self._target = announcement
            self._changed.notify_all()
        _LAG.set(max(0, announcement.version - self._version))

    # --- Updates

    async def _follow(self) -> None:
        pause = FIRST_PAUSE
        while True:
            with self._waits.waiting_for("announcement"):
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._current())
            target = self._target
            assert target is not None
            started = time.monotonic()
            try:
                manifest = await self._stage(target)
            except (InfrastructureError, WireError) as error:
                log.warning("an update is tried again", version=target.version, cause=str(error))
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            pause = FIRST_PAUSE
            await self._apply(manifest or target, started)

    def _current(self) -> bool:
        """Whether the engine holds what was announced, or newer weights of the same trainer."""
        target = self._target
        return target is None or (
            target.incarnation == self._incarnation and target.version <= self._version
        )

    async def _stage(self, target: pb.SubscribeResponse) -> Manifest | None:
        """One step towards the target: a delta, or full weights, perhaps of an older version; None
        when the host copy holds the target already."""
        if target.digest == self._host.digest:
            return None
        with self._waits.waiting_for("weights", f"version {target.version}"):
            parcel = await self._fetcher.fetch(target, self._host.digest)
        payload = parcel.payload
        if parcel.manifest.full and self._relay is not None:
            # The host copy changes with every version; others still fetch this one.
            payload = payload.copy()
        try:
            async with self._touching:
                await asyncio.to_thread(self._host.stage, parcel.manifest, payload)
                self._manifest = parcel.manifest
        except WireError:
            _REFUSED.labels("staging").inc()
            self._shelf.drop(parcel)
            raise
        if self._relay is None:
            self._shelf.drop(parcel)
        return parcel.manifest

    async def _make_full(self) -> Parcel | None:
        """What is held, for others."""
        async with self._touching:
            manifest = self._manifest
            if manifest is None or manifest.digest != self._host.digest:
                return None
            return Parcel.of(*await asyncio.to_thread(self._host.whole, manifest))

    async def _apply(self, staged: Manifest | pb.SubscribeResponse, started: float) -> None:
        """Brings the engine to what the host copy holds, and proves that it arrived."""
        manifest = staged if isinstance(staged, Manifest) else None
        report = pb.ReportRequest(
            node_id=self._node_id,
            version=staged.version,
            digest=self._host.digest,
            state=pb.NODE_STATE_STAGED,
            stage_seconds=time.monotonic() - started,
            bytes_received=manifest.payload_length if manifest is not None else 0,
        )
        self._reports.put_nowait(report)
        lacking = await asyncio.to_thread(self._host.lacking)
        canary = manifest.canary if manifest is not None else None
        pause = 0.0
        try:
            # A trainer that came back announces again what is in place; generations go on as if it
            # had not, to the last bit.
            if lacking or staged.version != self._version:
                pause = await self._engine.swap(lacking, staged.version, self._mode, canary)
        except CanaryError as error:
            _REFUSED.labels("canary").inc()
            self._refusal = _next(report, pb.NODE_STATE_FAILED, message=str(error))
            raise
        self._host.loaded()
        async with self._changed:
            self._incarnation, self._version = staged.incarnation, staged.version
            self._changed.notify_all()
        self._reports.put_nowait(_next(report, pb.NODE_STATE_APPLIED, pause_seconds=pause))
        _VERSION.set(staged.version)
        _LAG.set(max(0, self._target.version - staged.version) if self._target is not None else 0)
        _STAGE_SECONDS.observe(report.stage_seconds)
        _PAUSE_SECONDS.observe(pause)
        log.info(
            "policy applied",
            version=staged.version,
            tensors=len(lacking),
            bytes=report.bytes_received,
            stage_seconds=round(report.stage_seconds, 4),
            pause_seconds=round(pause, 4),
        )

    # --- Reports: beside the updates, which never wait for the broadcaster to hear of them

    async def _report(self) -> None:
        while True:
            await self._send(await self._reports.get())

    async def _say_refusal(self) -> None:
        """Also when the node goes down meanwhile: the engine's failure reaches all of it."""
        if self._refusal is None:
            return
        sending = asyncio.create_task(self._send(self._refusal))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            await sending
            raise

    async def _send(self, report: pb.ReportRequest) -> None:
        try:
            await rpc.call(
                self._stub.Report,
                report,
                what="report on weights",
                deadline_seconds=_REPORT_SECONDS,
            )
        except LeewayError as error:
            log.warning("a report was not heard", cause=str(error))


def _next(report: pb.ReportRequest, state: pb.NodeState, **fields: Any) -> pb.ReportRequest:
    """The report on the next state of the same version."""
    following = pb.ReportRequest()
    following.CopyFrom(report)
    following.MergeFrom(pb.ReportRequest(state=state, **fields))
    return following
