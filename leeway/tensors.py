"""The tensors of a policy: their names and dtypes on the wire, their bits, digests and layout.

Weights are numpy arrays under Hugging Face names. A uint16 array holds bfloat16: numpy has no such
type.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from leeway.errors import WireError

Tensor = npt.NDArray[Any]
Words = npt.NDArray[np.unsignedinteger[Any]]


class Encoding(IntEnum):
    """How a payload holds a tensor; the numbers are those of weights.proto."""

    FULL = 1
    SPARSE = 2
    DENSE = 3
    SAME = 4


# Names as in safetensors files.
_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "U8": np.dtype("u1"),
    "U32": np.dtype("<u4"),
    "U64": np.dtype("<u8"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_WORDS: dict[int, np.dtype[Any]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor of a policy, and where a payload holds it.

    Attributes:
        offset, length: The region, in bytes of the payload; sparse tensors share theirs.
        changed: Elements that a sparse region changes in this tensor.
        digest: Of the tensor after decoding.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    encoding: Encoding
    offset: int
    length: int
    changed: int
    digest: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * numpy_dtype(self.dtype).itemsize


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The wire's name of a numpy dtype; uint16 is BF16.

    Raises:
        TypeError: it has none.
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise TypeError(f"dtype {dtype}: weights are one of {', '.join(sorted(_DTYPES))}")
    return name


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype behind a wire name.

    Raises:
        WireError: unknown name.
    """
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise WireError(f"dtype {name!r}: weights are one of {', '.join(sorted(_DTYPES))}")
    return dtype


def words_of(tensor: Tensor) -> Words:
    """The tensor's bits as a flat array of unsigned words; a view, so that writing changes it."""
    if not tensor.flags.c_contiguous:
        raise ValueError("weights must be C-contiguous")
    return tensor.reshape(-1).view(_WORDS[tensor.dtype.itemsize])


def words_dtype(name: str) -> np.dtype[Any]:
    """Of the words that hold the bits of a wire dtype.

    Raises:
        WireError: unknown name.
    """
    return _WORDS[numpy_dtype(name).itemsize]


def digest_of(tensor: Tensor) -> str:
    """xxh3_128 of the tensor's bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(words_of(tensor).data)


def policy_digest(records: Iterable[Record]) -> str:
    """One number for the whole policy: names, dtypes, shapes and digests, whatever their order."""
    state = xxhash.xxh3_128()
    for record in sorted(records, key=lambda record: record.name):
        shape = ",".join(map(str, record.shape))
        state.update(f"{record.name}\t{record.dtype}\t{shape}\t{record.digest}\n".encode())
    return state.hexdigest()


def describe(tensors: Mapping[str, Tensor]) -> tuple[Record, ...]:
    """The policy as full records, each with its digest, laid out by `lay_out`."""
    return lay_out(
        Record(
            name=name,
            dtype=dtype_name(tensor.dtype),
            shape=tensor.shape,
            encoding=Encoding.FULL,
            offset=0,
            length=0,
            changed=0,
            digest=digest_of(tensor),
        )
        for name, tensor in tensors.items()
    )


def lay_out(records: Iterable[Record]) -> tuple[Record, ...]:
    """The same tensors as full records, one after the other, each at a cache line's start."""
    result = []
    offset = 0
    for record in records:
        length = record.nbytes
        result.append(
            replace(record, encoding=Encoding.FULL, offset=offset, length=length, changed=0)
        )
        offset = aligned(offset + length)
    return tuple(result)


def aligned(offset: int) -> int:
    """The next cache line's start."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
