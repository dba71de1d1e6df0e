"""Byte planes: unsigned words as their low bytes, then their second bytes, ..., under zstd.

Small numbers leave the upper planes empty, and bytes of one significance compress best together.
Nothing is trusted while decoding: counts and lengths are checked before memory is touched.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard

from leeway.errors import WireError
from leeway.tensors import Words

_LEVEL = 1
# How many planes follow; then each with its length.
_COUNT = struct.Struct("<B")
_LENGTH = struct.Struct("<Q")


def zigzag(words: Words) -> Words:
    """Small differences of either sign as small numbers: 0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    one, top = words.dtype.type(1), words.dtype.type(8 * words.itemsize - 1)
    return (words << one) ^ (np.zeros_like(words) - (words >> top))


def unzigzag(words: Words) -> Words:
    one = words.dtype.type(1)
    return (words >> one) ^ (np.zeros_like(words) - (words & one))


def encode(words: Words) -> bytes:
    """The words' low bytes, then their second bytes, ..., under zstd; zero planes on top go."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    count = (int(words.max(initial=0)).bit_length() + 7) // 8
    table = words.view(np.uint8).reshape(-1, words.itemsize)
    parts = [_COUNT.pack(count)]
    for plane in range(count):
        packed = compressor.compress(table[:, plane].tobytes())
        parts += [_LENGTH.pack(len(packed)), packed]
    return b"".join(parts)


def decode(data: memoryview, elements: int, dtype: np.dtype[Any]) -> tuple[Words, memoryview]:
    """`elements` words and what follows them."""
    decompressor = zstandard.ZstdDecompressor()
    try:
        (count,) = _COUNT.unpack_from(data)
        at = _COUNT.size
        if count > dtype.itemsize:
            raise WireError(f"{count} byte planes for words of {dtype.itemsize} bytes")
        words = np.zeros(elements, dtype)
        table = words.view(np.uint8).reshape(-1, dtype.itemsize)
        for plane in range(count):
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            packed = data[at : at + length]
            if len(packed) != length:
                raise WireError(f"a byte plane of {length} bytes, of which {len(packed)} came")
            if zstandard.frame_content_size(packed) != elements:
                raise WireError("a byte plane of another length than its elements")
            table[:, plane] = np.frombuffer(decompressor.decompress(packed), np.uint8)
            at += length
    except (struct.error, zstandard.ZstdError) as error:
        raise WireError(f"damaged byte planes: {error}") from error
    return words, data[at:]
