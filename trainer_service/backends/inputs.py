"""Micro-batches' inputs on their way to the other ranks.

The rest of a micro-batch, advantages and the like, stays on the leading rank, with the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from safetensors.numpy import load, save

from trainer_service.packed import Inputs, Segment

_ARRAYS = ("token_ids", "positions", "rows", "temperatures", "predictions", "targets")


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
