"""Arrays on the wire: packed little-endian bytes with dtype, shape and checksum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from leeway.errors import DataError, WireError
from leeway.v1 import trajectory_pb2 as pb

# Element types that may arrive in an Array; anything else (objects above all) is refused.
WIRE_DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}
# Both byte orders; `dtype.name` is slow.
_NAMES = {
    other: name for name, dtype in WIRE_DTYPES.items() for other in (dtype, dtype.newbyteorder())
}


def array_to_wire(array: npt.NDArray[Any], message: pb.Array) -> None:
    """Fills `message`, in place: a message put into another is copied, bytes and all.

    Raises `DataError` when the wire does not carry the array's dtype.
    """
    name = _NAMES.get(array.dtype)
    if name is None:
        raise DataError(f"dtype = {array.dtype}: send one of {sorted(WIRE_DTYPES)}")
    data = array.astype(WIRE_DTYPES[name], copy=False).tobytes()
    message.dtype, message.data = name, data
    message.shape.extend(array.shape)
    message.checksum = xxhash.xxh3_64_intdigest(data)


def array_from_wire(message: pb.Array, name: str) -> npt.NDArray[Any]:
    """A read-only view of the message's bytes. Raises `WireError` when they contradict its head."""
    dtype = WIRE_DTYPES.get(message.dtype)
    if dtype is None:
        raise WireError(f"{name}: dtype {message.dtype!r} is not one of {sorted(WIRE_DTYPES)}")
    data, shape = message.data, tuple(message.shape)
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise WireError(f"{name}: {len(data)} bytes do not make {message.dtype}{list(shape)}")
    if xxhash.xxh3_64_intdigest(data) != message.checksum:
        raise WireError(f"{name}: checksum differs, the bytes were damaged on the way; send again")
    return np.ndarray(shape, dtype, data)
