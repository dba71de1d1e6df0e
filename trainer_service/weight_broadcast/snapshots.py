"""Snapshots of the weights in memory that the trainer and its broadcasting process share.

A slot is a nameless file in memory: no name can collide, and nothing is left when both processes
are gone. The trainer writes a snapshot into a slot that nobody reads; from then on the slot belongs
to the broadcasting process until it hands it back.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from leeway.manifests import Canary
from leeway.tensors import Tensor, aligned, dtype_name, numpy_dtype, words_of

# The broadcasting process holds the newest snapshot, the one it encodes, and the anchor that late
# joiners load; the trainer writes into the fourth.
SLOTS = 4


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a slot holds a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A policy that lies whole in a slot."""

    slot: int
    version: int
    nbytes: int
    tensors: tuple[Placed, ...]
    canary: Canary | None

    def to_json(self) -> dict[str, Any]:
        canary = self.canary
        return {
            "slot": self.slot,
            "version": self.version,
            "nbytes": self.nbytes,
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "canary": None
            if canary is None
            else [canary.token_ids.tolist(), canary.logprobs.tolist(), canary.tolerance],
        }

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Snapshot:
        canary = tree["canary"]
        return cls(
            slot=tree["slot"],
            version=tree["version"],
            nbytes=tree["nbytes"],
            tensors=tuple(
                Placed(t["name"], t["dtype"], tuple(t["shape"]), t["offset"])
                for t in tree["tensors"]
            ),
            canary=None
            if canary is None
            else Canary(
                np.array(canary[0], dtype=np.int32),
                np.array(canary[1], dtype=np.float32),
                canary[2],
            ),
        )


def create_slots() -> list[int]:
    """File descriptors of empty slots; memory is taken when a snapshot is written."""
    return [_create_slot() for _ in range(SLOTS)]


def _create_slot() -> int:
    if sys.platform == "linux":
        # Unlike /dev/shm, of which containers get 64 MiB, bounded by the memory alone.
        return os.memfd_create("leeway-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write(
    descriptor: int,
    slot: int,
    version: int,
    tensors: Iterable[tuple[str, Tensor]],
    canary: Canary | None,
) -> Snapshot:
    """Copies the tensors into a slot, one at a time, as they come.

    Raises:
        ValueError: two tensors of one name, or none at all.
    """
    placed: list[Placed] = []
    names: set[str] = set()
    offset = 0
    for name, tensor in tensors:
        if name in names:
            raise ValueError(f"tensor {name!r} is published twice")
        names.add(name)
        tensor = np.ascontiguousarray(tensor).reshape(tensor.shape)
        placed.append(Placed(name, dtype_name(tensor.dtype), tensor.shape, offset))
        _write_at(descriptor, words_of(tensor).data.cast("B"), offset)
        offset = aligned(offset + tensor.nbytes)
    if not placed:
        raise ValueError("a policy without tensors")
    os.ftruncate(descriptor, offset)
    return Snapshot(slot, version, offset, tuple(placed), canary)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    # One call writes 2 GiB at most.
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


class SlotReader:
    """The broadcasting process's view of one slot; mapped once while its size stays the same."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._bytes = np.empty(0, dtype=np.uint8)

    def read(self, snapshot: Snapshot) -> tuple[dict[str, Tensor], memoryview]:
        """The snapshot's tensors and the bytes they lie in, without a copy."""
        if self._bytes.size != snapshot.nbytes:
            mapped = mmap.mmap(self._descriptor, snapshot.nbytes, access=mmap.ACCESS_READ)
            self._bytes = np.frombuffer(mapped, dtype=np.uint8)
        tensors = {}
        for placed in snapshot.tensors:
            dtype = numpy_dtype(placed.dtype)
            count = int(np.prod(placed.shape, dtype=np.int64))
            end = placed.offset + count * dtype.itemsize
            tensors[placed.name] = (
                self._bytes[placed.offset : end].view(dtype).reshape(placed.shape)
            )
        return tensors, self._bytes.data
