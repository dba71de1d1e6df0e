"""Manifests and chunks: how a policy travels.

The publisher and relaying nodes send them, receivers check them. A manifest is sealed once with a
checksum and passed on as it is; a payload goes in chunks, each with its offset and checksum. What
arrives damaged, out of order or inconsistent is a `WireError`; nothing else about a peer is trusted
before the digests of the decoded tensors agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash
from google.protobuf.message import DecodeError

from leeway.errors import WireError
from leeway.tensors import Encoding, Record, numpy_dtype, policy_digest
from leeway.v1 import weights_pb2 as pb


@dataclass(frozen=True, slots=True, eq=False)
class Canary:
    """A fixed prompt and what the trainer's weights say about it.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n - 1], of each token after the first, at temperature 1.
        tolerance: The largest difference that a node's engine may show.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    tolerance: float

    def __post_init__(self) -> None:
        if self.token_ids.size < 2 or self.logprobs.size != self.token_ids.size - 1:
            raise ValueError(
                f"canary: {self.token_ids.size} tokens and {self.logprobs.size} log-probabilities; "
                "give at least two tokens, and one log-probability for each but the first"
            )

    def deviation(self, logprobs: npt.NDArray[np.float32]) -> float:
        """The largest difference from the trainer's; infinite for what is not a number."""
        if logprobs.shape != self.logprobs.shape:
            return float("inf")
        worst = float(np.max(np.abs(logprobs - self.logprobs)))
        return worst if np.isfinite(worst) else float("inf")


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """What a payload holds, and what must come out of it.

    Attributes:
        base_digest: The policy that the payload changes; empty for full weights.
        digest: The policy that results.
    """

    run_id: str
    incarnation: int
    version: int
    base_digest: str
    records: tuple[Record, ...]
    payload_length: int
    digest: str
    canary: Canary | None = None

    @property
    def full(self) -> bool:
        return not self.base_digest


def seal(manifest: Manifest) -> pb.GetManifestResponse:
    """The manifest as it goes over the wire."""
    message = pb.Manifest(
        run_id=manifest.run_id,
        incarnation=manifest.incarnation,
        version=manifest.version,
        base_digest=manifest.base_digest,
        tensors=[
            pb.TensorEntry(
                name=record.name,
                dtype=record.dtype,
                shape=record.shape,
                encoding=f"ENCODING_{record.encoding.name}",
                offset=record.offset,
                length=record.length,
                changed=record.changed,
                digest=record.digest,
            )
            for record in manifest.records
        ],
        payload_length=manifest.payload_length,
        digest=manifest.digest,
    )
    if manifest.canary is not None:
        message.canary.token_ids.extend(manifest.canary.token_ids.tolist())
        message.canary.logprobs.extend(manifest.canary.logprobs.tolist())
        message.canary.tolerance = manifest.canary.tolerance
    data = message.SerializeToString()
    return pb.GetManifestResponse(manifest=data, checksum=xxhash.xxh3_64_intdigest(data))


def unseal(response: pb.GetManifestResponse) -> Manifest:
    """Checks and reads a sealed manifest.

    Raises:
        WireError: damaged, or its parts contradict each other.
    """
    if xxhash.xxh3_64_intdigest(response.manifest) != response.checksum:
        raise WireError("manifest: checksum mismatch")
    try:
        message = pb.Manifest.FromString(response.manifest)
        records = tuple(_record(entry) for entry in message.tensors)
        canary = _canary(message.canary) if message.HasField("canary") else None
    except (DecodeError, ValueError) as error:
        raise WireError(f"manifest: {error}") from error
    if len({record.name for record in records}) != len(records):
        raise WireError("manifest: a tensor's name occurs twice")
    # Sparse regions code at most a few bytes a change, and nothing else grows while it is packed.
    largest = sum(record.nbytes for record in records) + (64 << 10) * (len(records) + 1)
    if message.payload_length > 2 * largest:
        raise WireError(f"manifest: a payload of {message.payload_length} bytes for {largest}")
    if policy_digest(records) != message.digest:
        raise WireError("manifest: the policy's digest does not follow from its tensors'")
    return Manifest(
        run_id=message.run_id,
        incarnation=message.incarnation,
        version=message.version,
        base_digest=message.base_digest,
        records=records,
        payload_length=message.payload_length,
        digest=message.digest,
        canary=canary,
    )


def chunk(part: memoryview, offset: int) -> pb.FetchResponse:
    """The part of a payload that starts at `offset`, as it goes over the wire."""
    data = part.tobytes()
    return pb.FetchResponse(offset=offset, data=data, checksum=xxhash.xxh3_64_intdigest(data))


def check_chunk(response: pb.FetchResponse, expected_offset: int, room: int) -> bytes:
    """The data of a chunk that must lie at `expected_offset` and fit into `room` bytes.

    Raises:
        WireError: damaged, out of order, empty or too long.
    """
    if response.offset != expected_offset:
        raise WireError(f"chunk: at {response.offset} instead of {expected_offset}")
    if not 0 < len(response.data) <= room:
        raise WireError(f"chunk: {len(response.data)} bytes where {room} remain")
    if xxhash.xxh3_64_intdigest(response.data) != response.checksum:
        raise WireError(f"chunk: checksum mismatch at {response.offset}")
    return response.data


def _record(entry: pb.TensorEntry) -> Record:
    numpy_dtype(entry.dtype)
    shape = tuple(entry.shape)
    if any(size < 0 for size in shape):
        raise WireError(f"manifest: {entry.name}: shape {shape}")
    return Record(
        name=entry.name,
        dtype=entry.dtype,
        shape=shape,
        encoding=Encoding(entry.encoding),
        offset=entry.offset,
        length=entry.length,
        changed=entry.changed,
        digest=entry.digest,
    )


def _canary(message: pb.Canary) -> Canary:
    return Canary(
        token_ids=np.array(message.token_ids, dtype=np.int32),
        logprobs=np.array(message.logprobs, dtype=np.float32),
        tolerance=message.tolerance,
    )
