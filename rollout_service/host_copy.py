"""The node's own copy of the policy in host memory: where new weights are staged and verified.

What it says it holds, it has hashed. While new weights are staged in place it holds nothing; if
they turn out wrong it goes on holding nothing, and full weights have to come. The engine never
reads from it outside `Engine.swap`, so that it generates on whatever happens here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from leeway import deltas
from leeway.deltas import Encoding, Record, Tensor
from leeway.errors import WireError
from leeway.manifests import Manifest


class HostCopy:
    """Weights in host memory, verified. Empty when built; `digest` is empty as long as it is."""

    def __init__(self) -> None:
        self.digest = ""
        self._tensors: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}

    @property
    def digests(self) -> Mapping[str, str]:
        """Of every tensor it holds."""
        return self._digests

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over tensors, which nobody else may write, and hashes them."""
        records = deltas.describe(tensors)
        self._hold(
            dict(tensors), {r.name: r.digest for r in records}, deltas.policy_digest(records)
        )

    def whole(self, manifest: Manifest) -> tuple[Manifest, npt.NDArray[np.uint8]]:
        """A copy of what is held, as full weights under the manifest that led to it."""
        assert manifest.digest == self.digest
        records = deltas.lay_out(manifest.records)
        length = deltas.aligned(records[-1].offset + records[-1].length)
        payload = np.zeros(length, dtype=np.uint8)
        for record in records:
            words = deltas.words_of(self._tensors[record.name])
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
            flat = payload[record.offset : end].view(deltas.numpy_dtype(record.dtype))
            tensors[record.name] = flat.reshape(record.shape)
            self._verify(record, tensors[record.name])
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
                flat = change.words.copy().view(deltas.numpy_dtype(record.dtype))
                held[record.name] = flat.reshape(record.shape)
            else:
                deltas.apply(change, held[record.name])
            self._verify(record, held[record.name])
        tensors = {record.name: held[record.name] for record in manifest.records}
        self._hold(tensors, {r.name: r.digest for r in manifest.records}, manifest.digest)

    def _check_base(self, record: Record) -> None:
        """Before anything is touched: does the change fit the tensor held?"""
        if record.encoding is Encoding.FULL:
            return
        tensor = self._tensors.get(record.name)
        if (
            tensor is None
            or tensor.shape != record.shape
            or deltas.dtype_name(tensor.dtype) != record.dtype
        ):
            raise WireError(f"{record.name}: a change of a tensor that is not held so")
        if record.encoding is Encoding.SAME and self._digests[record.name] != record.digest:
            raise WireError(f"{record.name}: said to be the same, with another digest")

    def _verify(self, record: Record, tensor: Tensor) -> None:
        digest = deltas.digest_of(tensor)
        if digest != record.digest:
            raise WireError(f"{record.name}: digest {digest} instead of {record.digest}")

    def _hold(self, tensors: dict[str, Tensor], digests: dict[str, str], digest: str) -> None:
        self._tensors, self._digests, self.digest = tensors, digests, digest
