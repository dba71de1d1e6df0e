"""What a rank needs of a micro-batch to compute it: tokens in, places of the trained ones.

The rest of a micro-batch, advantages and the like, stays on the leading rank, with the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from safetensors.numpy import load, save

from trainer_service.batching import Float32Array, Int64Array, PackedBatch, Segment

_ARRAYS = ("token_ids", "positions", "rows", "temperatures", "predictions", "targets")


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """As the attributes of the same names in `PackedBatch`."""

    token_ids: Int64Array
    positions: Int64Array
    segments: tuple[Segment, ...]
    rows: Int64Array
    temperatures: Float32Array
    predictions: Int64Array
    targets: Int64Array

    @classmethod
    def of(cls, batch: PackedBatch | Inputs) -> Inputs:
        return cls(segments=batch.segments, **{name: getattr(batch, name) for name in _ARRAYS})

    @classmethod
    def idle(cls) -> Inputs:
        """A micro-batch that trains nothing: for a rank that must take part but has none left."""
        none = np.empty(0, dtype=np.int64)
        return cls(
            token_ids=np.zeros(1, dtype=np.int64),
            positions=np.zeros(1, dtype=np.int64),
            segments=(Segment(0, 1),),
            rows=none,
            temperatures=none.astype(np.float32),
            predictions=none,
            targets=none,
        )

    def filled(self, multiple: int) -> Inputs:
        """With tokens appended that nothing sees, up to a multiple."""
        size = self.token_ids.size
        missing = -size % multiple
        if not missing:
            return self
        blank = np.zeros(missing, dtype=np.int64)
        return replace(
            self,
            token_ids=np.concatenate([self.token_ids, blank]),
            positions=np.concatenate([self.positions, blank]),
            segments=(*self.segments, Segment(size, missing)),
        )


def encode(batches: Sequence[Inputs]) -> bytes:
    """For the other ranks; `decode` is its inverse."""
    arrays = {"count": np.array([len(batches)], dtype=np.int64)}
    for index, batch in enumerate(batches):
        arrays[f"segments.{index}"] = np.array(batch.segments, dtype=np.int64)
        # safetensors writes a strided array's memory as if it were contiguous.
        arrays |= {
            f"{name}.{index}": np.ascontiguousarray(getattr(batch, name)) for name in _ARRAYS
        }
    return save(arrays)


def decode(message: bytes) -> list[Inputs]:
    arrays = load(message)
    return [
        Inputs(
            segments=tuple(Segment(*row) for row in arrays[f"segments.{index}"].tolist()),
            **{name: arrays[f"{name}.{index}"] for name in _ARRAYS},
        )
        for index in range(int(arrays["count"][0]))
    ]
