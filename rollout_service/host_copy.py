"""The node's own copy of the policy in host memory: where new weights are staged and verified.

What it says it holds, it has hashed. While new weights are staged in place it holds nothing; if
they turn out wrong it goes on holding nothing, and full weights have to come. The engine never
reads from it outside `Engine.swap`, so that it generates on whatever happens here.

It also knows what the engine lacks of it, element by element, over any number of staged versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from leeway import deltas
from leeway.deltas import Change, Positions
from leeway.errors import WireError
from leeway.manifests import Manifest
from leeway.tensors import (
    Encoding,
    Record,
    Tensor,
    aligned,
    describe,
    digest_of,
    dtype_name,
    lay_out,
    numpy_dtype,
    policy_digest,
    words_of,
)
from rollout_service.engines.base import ChangedElements, Update

# Where a larger share of a tensor changes, to copy it whole is faster than to scatter into it.
_WHOLE_FROM = 1 / 16


class HostCopy:
    """Weights in host memory, verified. Empty when built; `digest` is empty as long as it is."""

    def __init__(self) -> None:
        self.digest = ""
        self._tensors: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}
        # Digests of the tensors that the engine holds; and what has changed here since, where that
        # is known: the flat positions in each tensor.
        self._loaded: dict[str, str] = {}
        self._moved: dict[str, Positions] = {}

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over the tensors that the engine has loaded, which nobody else may write."""
        records = describe(tensors)
        self._hold(dict(tensors), {r.name: r.digest for r in records}, policy_digest(records))
        self.loaded()

    def lacking(self) -> dict[str, Update]:
        """What the engine needs to hold what is held here: each tensor that differs, whole or as
        its changed elements. Whole ones share this copy's memory."""
        updates: dict[str, Update] = {}
        for name, digest in self._digests.items():
            if self._loaded.get(name) == digest:
                continue
            tensor, positions = self._tensors[name], self._moved.get(name)
            if positions is None or positions.size > _WHOLE_FROM * tensor.size:
                updates[name] = tensor
            else:
                updates[name] = ChangedElements(positions, tensor.reshape(-1)[positions])
        return updates

    def loaded(self) -> None:
        """The engine has taken over what it lacked."""
        self._loaded = dict(self._digests)
        self._moved = {name: np.empty(0, dtype=np.int64) for name in self._digests}

    def whole(self, manifest: Manifest) -> tuple[Manifest, npt.NDArray[np.uint8]]:
        """A copy of what is held, as full weights under the manifest that led to it."""
        assert manifest.digest == self.digest
        records = lay_out(manifest.records)
        length = aligned(records[-1].offset + records[-1].length)
        payload = np.zeros(length, dtype=np.uint8)
        for record in records:
            words = words_of(self._tensors[record.name])
            payload[record.offset : record.offset + record.length] = words.view(np.uint8)
        full = replace(manifest, base_digest="", records=records, payload_length=length)
        return full, payload

    def stage(self, manifest: Manifest, payload: npt.NDArray[np.uint8]) -> None:
        """Puts the manifest's policy in place of the one held, and verifies every tensor.

        Full weights stay in `payload`, which belongs to the copy from then on.

        Raises:
            WireError: the payload is damaged, does not fit what is held, or a digest is wrong.
                Where the weights held were touched, the copy is empty afterwards.
        """
        if manifest.full:
            self._stage_full(manifest, payload)
        elif manifest.base_digest == self.digest:
            self._stage_delta(manifest, payload)
        else:
            raise WireError(
                f"version {manifest.version}: a delta from {manifest.base_digest or 'nothing'}, "
                f"but {self.digest or 'nothing'} is held"
            )

    def _stage_full(self, manifest: Manifest, payload: npt.NDArray[np.uint8]) -> None:
        tensors = {}
        for record in manifest.records:
            end = record.offset + record.length
            if record.encoding is not Encoding.FULL or record.length != record.nbytes:
                raise WireError(f"{record.name}: not whole in a manifest of full weights")
            if end > payload.size:
                raise WireError(f"{record.name}: ends at {end} of {payload.size} bytes")
            flat = payload[record.offset : end].view(numpy_dtype(record.dtype))
            tensors[record.name] = flat.reshape(record.shape)
            self._verify(record, tensors[record.name])
        self._moved = {}
        self._hold(tensors, {r.name: r.digest for r in manifest.records}, manifest.digest)

    def _stage_delta(self, manifest: Manifest, payload: npt.NDArray[np.uint8]) -> None:
        for record in manifest.records:
            self._check_base(record)
        changes = list(deltas.unpack(manifest.records, payload.data))
        held = self._tensors
        self.digest, self._tensors = "", {}
        for record, change in changes:
            if change.encoding is Encoding.FULL:
                assert change.words is not None
                flat = change.words.copy().view(numpy_dtype(record.dtype))
                held[record.name] = flat.reshape(record.shape)
            else:
                deltas.apply(change, held[record.name])
            self._move(record.name, change)
            self._verify(record, held[record.name])
        tensors = {record.name: held[record.name] for record in manifest.records}
        self._hold(tensors, {r.name: r.digest for r in manifest.records}, manifest.digest)

    def _move(self, name: str, change: Change) -> None:
        before, now = self._moved.pop(name, None), change.positions
        if before is not None and now is not None:
            self._moved[name] = np.union1d(before, now) if before.size else now

    def _check_base(self, record: Record) -> None:
        """Before anything is touched: does the change fit the tensor held?"""
        if record.encoding is Encoding.FULL:
            return
        tensor = self._tensors.get(record.name)
        if (
            tensor is None
            or tensor.shape != record.shape
            or dtype_name(tensor.dtype) != record.dtype
        ):
            raise WireError(f"{record.name}: a change of a tensor that is not held so")
        if record.encoding is Encoding.SAME and self._digests[record.name] != record.digest:
            raise WireError(f"{record.name}: said to be the same, with another digest")

    def _verify(self, record: Record, tensor: Tensor) -> None:
        digest = digest_of(tensor)
        if digest != record.digest:
            raise WireError(f"{record.name}: digest {digest} instead of {record.digest}")

    def _hold(self, tensors: dict[str, Tensor], digests: dict[str, str], digest: str) -> None:
        self._tensors, self._digests, self.digest = tensors, digests, digest
