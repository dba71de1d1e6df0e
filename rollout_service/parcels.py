"""Payloads that a node has, or is receiving: kept so that transfers resume and others can relay
them.

A parcel is named by what it leads from and to, so that its bytes are the same whoever sends them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np
import numpy.typing as npt

from leeway.manifests import Manifest, seal
from leeway.v1 import weights_pb2 as pb

# Full weights go when nobody has asked for them for so long, once they have been put to use.
_FULL_IDLE_SECONDS = 60.0
_KEPT_DELTAS = 8


class Parcel:
    """One payload, readable up to `received` from its first byte on.

    Attributes:
        sealed: The manifest as it came, to be passed on.
        payload: uint8 [payload_length].
    """

    def __init__(
        self,
        manifest: Manifest,
        sealed: pb.GetManifestResponse,
        payload: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        self.manifest = manifest
        self.sealed = sealed
        self.payload = (
            np.empty(manifest.payload_length, dtype=np.uint8) if payload is None else payload
        )
        self.received = 0
        self.failed = False
        self.last_read = 0.0
        self._progress = asyncio.Event()

    @classmethod
    def of(cls, manifest: Manifest, payload: npt.NDArray[np.uint8]) -> Parcel:
        """A whole one."""
        parcel = cls(manifest, seal(manifest), payload)
        parcel.received = payload.size
        return parcel

    @property
    def key(self) -> tuple[str, str]:
        return self.manifest.digest, self.manifest.base_digest

    @property
    def whole(self) -> bool:
        return self.received == self.payload.size

    def add(self, data: bytes) -> None:
        """The next bytes."""
        end = self.received + len(data)
        self.payload[self.received : end] = np.frombuffer(data, dtype=np.uint8)
        self.received = end
        self._wake()

    def fail(self) -> None:
        """Nothing more comes, or what came is wrong."""
        self.failed = True
        self._wake()

    async def beyond(self, offset: int, deadline_seconds: float) -> bool:
        """Waits until there is something at `offset`; False when it failed or did not come in
        time."""
        try:
            async with asyncio.timeout(deadline_seconds):
                while not self.failed and self.received <= offset:
                    await self._progress.wait()
        except TimeoutError:
            return False
        return not self.failed

    def _wake(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()


class Shelf:
    """The newest parcels: a few deltas, and full weights for as long as others fetch them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parcels: dict[tuple[str, str], Parcel] = {}
        self._arrived = asyncio.Event()
        self._making = asyncio.Lock()
        # Full weights, made when somebody asks and there are none; whoever holds weights sets it.
        self.make_full: Callable[[], Awaitable[Parcel | None]] | None = None

    def find(self, digest: str, base_digest: str) -> Parcel | None:
        parcel = self._parcels.get((digest, base_digest))
        if parcel is not None:
            parcel.last_read = self._clock()
        return parcel

    def put(self, parcel: Parcel) -> None:
        """Takes a parcel in, at the latest when its first byte is due, and lets old ones go."""
        self._parcels.pop(parcel.key, None)
        parcel.last_read = self._clock()
        self._parcels[parcel.key] = parcel
        full = [p for p in self._parcels.values() if p.manifest.full and p is not parcel]
        replaced = [p for p in full if parcel.manifest.full or self._idle(p)]
        deltas = [p for p in self._parcels.values() if not p.manifest.full]
        for old in [*replaced, *deltas[:-_KEPT_DELTAS]]:
            del self._parcels[old.key]
        self._arrived.set()
        self._arrived = asyncio.Event()

    def drop(self, parcel: Parcel) -> None:
        """Its content is wrong."""
        parcel.fail()
        self._parcels.pop(parcel.key, None)

    def leading_to(self, version: int, base_digest: str) -> Parcel | None:
        """From a base to a version; from nothing, to a version from which deltas lead on."""
        for parcel in reversed(self._parcels.values()):
            manifest = parcel.manifest
            oldest = version if base_digest else version - _KEPT_DELTAS
            if (
                manifest.base_digest == base_digest
                and oldest <= manifest.version <= version
                and not parcel.failed
            ):
                return parcel
        return None

    async def full(self, version: int) -> Parcel | None:
        """Full weights of about a version: those there are, or made of what the node holds."""
        async with self._making:
            parcel = self.leading_to(version, "")
            if parcel is None and self.make_full is not None:
                parcel = await self.make_full()
                if parcel is not None:
                    self.put(parcel)
            return parcel

    async def wait_leading_to(
        self, version: int, base_digest: str, deadline_seconds: float
    ) -> Parcel | None:
        """The same, once it arrives; None when it does not in time, or another way was taken."""
        try:
            async with asyncio.timeout(deadline_seconds):
                while (parcel := self.leading_to(version, base_digest)) is None:
                    if any(p.manifest.version >= version for p in self._parcels.values()):
                        return None
                    await self._arrived.wait()
        except TimeoutError:
            return None
        return parcel

    def _idle(self, parcel: Parcel) -> bool:
        return parcel.whole and self._clock() - parcel.last_read > _FULL_IDLE_SECONDS
