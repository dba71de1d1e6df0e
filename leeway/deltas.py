"""The delta codec: what turns one policy's weights into the next, bit for bit.

The bits of weights are read as unsigned words, and a change is the difference of two words modulo
their width. Differences add: applying a delta is adding it, and two deltas in a row are their sum,
so that a node may skip versions without anybody keeping the weights in between.

Everything here is pure. A payload is a run of regions; a record says which region holds its tensor:

- SAME: none.
- SPARSE: many such tensors share a region: the gaps between changed positions (counted as if the
  tensors lay end to end) and the differences there.
- DENSE: the differences of every element.
- FULL: the tensor's bytes as they are.

Sparse and dense regions are byte planes (`leeway.byte_planes`). Nothing is trusted while decoding:
counts, lengths and positions are checked before memory is touched, and the caller checks every
result's digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from leeway import byte_planes
from leeway.byte_planes import unzigzag, zigzag
from leeway.errors import WireError
from leeway.tensors import Encoding, Record, Tensor, Words, numpy_dtype, words_dtype, words_of

Positions = npt.NDArray[np.int64]
Buffer = bytes | bytearray | memoryview

# Blocks of 64 bits compared at once: two such runs and the mask stay in a second-level cache.
_BLOCKS = 1 << 16
# Above this share of changed elements their positions cost more than coding every difference.
_DENSE_FROM = 0.25
# A sparse region ends after so many changes, which bounds what decoding holds.
_REGION_CHANGES = 1 << 22


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
        return byte_planes.encode(zigzag(change.words))
    start = 0
    positions, words = [], []
    for record, change in members:
        assert change.positions is not None and change.words is not None
        positions.append(change.positions + start)
        words.append(change.words)
        start += record.elements
    gaps = np.diff(np.concatenate(positions), prepend=-1) - 1
    return byte_planes.encode(gaps.view(np.uint64)) + byte_planes.encode(
        zigzag(np.concatenate(words))
    )


def _decode_whole(record: Record, region: memoryview) -> Change:
    dtype = words_dtype(record.dtype)
    if record.encoding is Encoding.FULL:
        if len(region) != record.nbytes:
            raise WireError(f"{record.name}: {len(region)} bytes for {record.nbytes}")
        return Change(Encoding.FULL, None, np.frombuffer(region, dtype))
    words, rest = byte_planes.decode(region, record.elements, dtype)
    if rest:
        raise WireError(f"{record.name}: {len(rest)} bytes too many")
    return Change(Encoding.DENSE, None, unzigzag(words))


def _decode_sparse(
    members: Sequence[Record], region: memoryview
) -> Iterator[tuple[Record, Change]]:
    first = members[0]
    for record in members:
        if not 0 <= record.changed <= record.elements:
            raise WireError(f"{record.name}: {record.changed} of {record.elements} changed")
    dtype = words_dtype(first.dtype)
    count = sum(record.changed for record in members)
    elements = sum(record.elements for record in members)
    gaps, rest = byte_planes.decode(region, count, np.dtype("<u8"))
    zigzags, rest = byte_planes.decode(rest, count, dtype)
    if rest:
        raise WireError(f"{first.name}: {len(rest)} bytes too many")
    if gaps.size and int(gaps.max()) >= elements:
        raise WireError(f"{first.name}: a gap of {gaps.max()} within {elements} elements")
    positions = np.cumsum(gaps.view(np.int64) + 1) - 1
    words = unzigzag(zigzags)
    start = done = 0
    for record in members:
        if words_dtype(record.dtype) != dtype:
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
