"""The delta codec: what turns one policy's weights into the next, bit for bit.

Weights are numpy arrays under Hugging Face names (bfloat16 as uint16). Their bits are read as
unsigned words, and a change is the difference of two words modulo their width. Differences add:
applying a delta is adding it, and two deltas in a row are their sum, so that a node may skip
versions without anybody keeping the weights in between.

Everything here is pure. A payload is a run of regions; a record says which region holds its tensor:

- SAME: none.
- SPARSE: many such tensors share a region: the gaps between changed positions (counted as if the
  tensors lay end to end) and the differences there.
- DENSE: the differences of every element.
- FULL: the tensor's bytes as they are.

Sparse and dense regions are byte planes under zstd. Nothing is trusted while decoding: counts,
lengths and positions are checked before memory is touched, and the caller checks every result's
digest.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from leeway.errors import WireError

Tensor = npt.NDArray[Any]
Words = npt.NDArray[np.unsignedinteger[Any]]
Positions = npt.NDArray[np.int64]
Buffer = bytes | bytearray | memoryview


class Encoding(IntEnum):
    """How a payload holds a tensor; the numbers are those of weights.proto."""

    FULL = 1
    SPARSE = 2
    DENSE = 3
    SAME = 4


# Names as in safetensors files. A uint16 array holds bfloat16: numpy has no such type.
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
# Blocks of 64 bits compared at once: two such runs and the mask stay in a second-level cache.
_BLOCKS = 1 << 16
# Above this share of changed elements their positions cost more than coding every difference.
_DENSE_FROM = 0.25
# A sparse region ends after so many changes, which bounds what decoding holds.
_REGION_CHANGES = 1 << 22
_LEVEL = 1


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


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What happens to one tensor.

    Attributes:
        positions: int64 [changed], ascending flat positions; None unless SPARSE.
        words: The differences at `positions` (SPARSE) or everywhere (DENSE); the tensor's own words
            (FULL); None (SAME).
    """

    encoding: Encoding
    positions: Positions | None = None
    words: Words | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """A policy as records and the payload that they point into."""

    records: tuple[Record, ...]
    payload: bytes


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


# --- Differences


def difference(base: Tensor | None, new: Tensor) -> Change:
    """What turns `base` into `new`; FULL when their dtypes or shapes differ.

    A FULL change refers to the memory of `new`.
    """
    if base is None or base.dtype != new.dtype or base.shape != new.shape:
        return Change(Encoding.FULL, None, words_of(new))
    positions, words = _changed_words(words_of(base), words_of(new))
    if positions.size == 0:
        return Change(Encoding.SAME)
    if positions.size >= _DENSE_FROM * new.size:
        return Change(Encoding.DENSE, None, words_of(new) - words_of(base))
    return Change(Encoding.SPARSE, positions, words)


def _changed_words(base: Words, new: Words) -> tuple[Positions, Words]:
    """Flat positions at which the words differ, and the differences.

    Compares blocks of 64 bits first: most of them are equal, and only the others are looked into.
    """
    per_block = 8 // base.itemsize
    shift = per_block.bit_length() - 1
    whole = base.size >> shift << shift
    left, right = base[:whole].view(np.uint64), new[:whole].view(np.uint64)
    mask = np.empty(min(_BLOCKS, left.size), dtype=np.bool_)
    positions, words = [], []
    for start in range(0, left.size, _BLOCKS):
        a, b = left[start : start + _BLOCKS], right[start : start + _BLOCKS]
        blocks = np.flatnonzero(np.not_equal(a, b, out=mask[: a.size]))
        if blocks.size == 0:
            continue
        differences = b[blocks].view(base.dtype) - a[blocks].view(base.dtype)
        inside = np.flatnonzero(differences)
        places = (blocks[inside >> shift] + start) << shift
        places |= inside & (per_block - 1)
        positions.append(places)
        words.append(differences[inside])
    tail = new[whole:] - base[whole:]
    inside = np.flatnonzero(tail)
    positions.append(inside + whole)
    words.append(tail[inside])
    return np.concatenate(positions), np.concatenate(words)


def apply(change: Change, tensor: Tensor) -> None:
    """Adds the change to `tensor`, in place.

    Raises:
        WireError: the change does not fit the tensor.
    """
    if change.encoding is Encoding.SAME:
        return
    words = words_of(tensor)
    assert change.words is not None
    if change.words.dtype != words.dtype:
        raise WireError(f"a change of {change.words.dtype} words for a tensor of {words.dtype}")
    if change.positions is not None:
        if (
            change.positions.size
            and not 0 <= change.positions[0] <= change.positions[-1] < words.size
        ):
            raise WireError(f"changed positions outside a tensor of {words.size} elements")
        words[change.positions] += change.words
        return
    if change.words.size != words.size:
        raise WireError(f"a change of {change.words.size} elements for a tensor of {words.size}")
    if change.encoding is Encoding.DENSE:
        words += change.words
    else:
        words[:] = change.words


def compose(first: Change, second: Change) -> Change:
    """The one change that does what `first` and then `second` do.

    Both belong to tensors of one dtype and shape, unless `second` is FULL.
    """
    if second.encoding is Encoding.FULL or first.encoding is Encoding.SAME:
        return second
    if second.encoding is Encoding.SAME:
        return first
    if first.encoding is Encoding.SPARSE and second.encoding is Encoding.SPARSE:
        return _merge(first, second)
    # Addition commutes: start from the change that covers every element.
    whole, other = (second, first) if first.encoding is Encoding.SPARSE else (first, second)
    assert whole.words is not None
    total = whole.words.copy()
    apply(other, total)
    return Change(whole.encoding, None, total)


def _merge(first: Change, second: Change) -> Change:
    assert first.positions is not None and second.positions is not None
    assert first.words is not None and second.words is not None
    positions = np.concatenate((first.positions, second.positions))
    # A stable sort of two ascending runs is a merge.
    order = np.argsort(positions, kind="stable")
    positions = positions[order]
    words = np.concatenate((first.words, second.words))[order]
    twice = np.flatnonzero(positions[1:] == positions[:-1])
    words[twice] += words[twice + 1]
    keep = words != 0
    keep[twice + 1] = False
    if not keep.any():
        return Change(Encoding.SAME)
    return Change(Encoding.SPARSE, positions[keep], words[keep])


# --- Payloads


def pack(changes: Sequence[tuple[Record, Change]]) -> Delta:
    """Encodes changes.

    Args:
        changes: With each the record of its result (name, dtype, shape, digest); where it lies is
            filled in here.
    """
    records = [
        replace(record, encoding=change.encoding, offset=0, length=0, changed=0)
        for record, change in changes
    ]
    payload: list[bytes] = []
    offset = 0
    for members in _regions(changes):
        region = _encode([changes[index] for index in members])
        for index in members:
            positions = changes[index][1].positions
            records[index] = replace(
                records[index],
                offset=offset,
                length=len(region),
                changed=0 if positions is None else positions.size,
            )
        payload.append(region)
        offset += len(region)
    return Delta(tuple(records), b"".join(payload))


def unpack(records: Sequence[Record], payload: Buffer) -> Iterator[tuple[Record, Change]]:
    """Decodes a payload region by region; yields every record that is not SAME.

    Raises:
        WireError: the records and the payload contradict each other, or are damaged.
    """
    view = memoryview(payload)
    shared: dict[int, list[Record]] = {}
    for record in records:
        if record.encoding is Encoding.SPARSE:
            shared.setdefault(record.offset, []).append(record)
        elif record.encoding is not Encoding.SAME:
            yield record, _decode_whole(record, _region(record, view))
    for members in shared.values():
        yield from _decode_sparse(members, _region(members[0], view))


def _regions(changes: Sequence[tuple[Record, Change]]) -> Iterator[list[int]]:
    """Which changes lie together: sparse ones of one word size up to a bound, the others alone."""
    open_regions: dict[int, tuple[list[int], int]] = {}
    for index, (record, change) in enumerate(changes):
        if change.encoding is Encoding.SAME:
            continue
        if change.positions is None:
            yield [index]
            continue
        width = numpy_dtype(record.dtype).itemsize
        members, count = open_regions.pop(width, ([], 0))
        members.append(index)
        count += change.positions.size
        if count >= _REGION_CHANGES:
            yield members
        else:
            open_regions[width] = (members, count)
    for members, _ in open_regions.values():
        yield members


def _encode(members: Sequence[tuple[Record, Change]]) -> bytes:
    record, change = members[0]
    assert change.words is not None
    if change.encoding is Encoding.FULL:
        return change.words.tobytes()
    if change.encoding is Encoding.DENSE:
        return _encode_planes(_zigzag(change.words))
    start = 0
    positions, words = [], []
    for record, change in members:
        assert change.positions is not None and change.words is not None
        positions.append(change.positions + start)
        words.append(change.words)
        start += record.elements
    gaps = np.diff(np.concatenate(positions), prepend=-1) - 1
    return _encode_planes(gaps.view(np.uint64)) + _encode_planes(_zigzag(np.concatenate(words)))


def _decode_whole(record: Record, region: memoryview) -> Change:
    dtype = _WORDS[numpy_dtype(record.dtype).itemsize]
    if record.encoding is Encoding.FULL:
        if len(region) != record.nbytes:
            raise WireError(f"{record.name}: {len(region)} bytes for {record.nbytes}")
        return Change(Encoding.FULL, None, np.frombuffer(region, dtype))
    words, rest = _decode_planes(region, record.elements, dtype)
    if rest:
        raise WireError(f"{record.name}: {len(rest)} bytes too many")
    return Change(Encoding.DENSE, None, _unzigzag(words))


def _decode_sparse(
    members: Sequence[Record], region: memoryview
) -> Iterator[tuple[Record, Change]]:
    first = members[0]
    for record in members:
        if not 0 <= record.changed <= record.elements:
            raise WireError(f"{record.name}: {record.changed} of {record.elements} changed")
    dtype = _WORDS[numpy_dtype(first.dtype).itemsize]
    count = sum(record.changed for record in members)
    elements = sum(record.elements for record in members)
    gaps, rest = _decode_planes(region, count, np.dtype("<u8"))
    zigzags, rest = _decode_planes(rest, count, dtype)
    if rest:
        raise WireError(f"{first.name}: {len(rest)} bytes too many")
    if gaps.size and int(gaps.max()) >= elements:
        raise WireError(f"{first.name}: a gap of {gaps.max()} within {elements} elements")
    positions = np.cumsum(gaps.view(np.int64) + 1) - 1
    words = _unzigzag(zigzags)
    start = done = 0
    for record in members:
        if _WORDS[numpy_dtype(record.dtype).itemsize] != dtype:
            raise WireError(f"{record.name}: shares a region with {first.name} of other width")
        end = done + record.changed
        inside = positions[done:end] - start
        if inside.size and not 0 <= inside[0] <= inside[-1] < record.elements:
            raise WireError(f"{record.name}: positions outside {record.elements} elements")
        yield record, Change(Encoding.SPARSE, inside, words[done:end])
        start += record.elements
        done = end


def _region(record: Record, view: memoryview) -> memoryview:
    end = record.offset + record.length
    if not 0 <= record.offset <= end <= len(view):
        raise WireError(
            f"{record.name}: bytes {record.offset} to {end} of a payload of {len(view)}"
        )
    return view[record.offset : end]


# --- Byte planes

# How many planes follow; then each with its length.
_COUNT = struct.Struct("<B")
_LENGTH = struct.Struct("<Q")


def _zigzag(words: Words) -> Words:
    """Small differences of either sign as small numbers: 0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    one, top = words.dtype.type(1), words.dtype.type(8 * words.itemsize - 1)
    return (words << one) ^ (np.zeros_like(words) - (words >> top))


def _unzigzag(words: Words) -> Words:
    one = words.dtype.type(1)
    return (words >> one) ^ (np.zeros_like(words) - (words & one))


def _encode_planes(words: Words) -> bytes:
    """The words' low bytes, then their second bytes, ..., under zstd; zero planes on top go."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    count = (int(words.max(initial=0)).bit_length() + 7) // 8
    table = words.view(np.uint8).reshape(-1, words.itemsize)
    parts = [_COUNT.pack(count)]
    for plane in range(count):
        packed = compressor.compress(table[:, plane].tobytes())
        parts += [_LENGTH.pack(len(packed)), packed]
    return b"".join(parts)


def _decode_planes(
    data: memoryview, elements: int, dtype: np.dtype[Any]
) -> tuple[Words, memoryview]:
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
            if zstandard.frame_content_size(packed) != elements:
                raise WireError("a byte plane of another length than its elements")
            table[:, plane] = np.frombuffer(decompressor.decompress(packed), np.uint8)
            at += length
    except (struct.error, zstandard.ZstdError) as error:
        raise WireError(f"damaged byte planes: {error}") from error
    return words, data[at:]
