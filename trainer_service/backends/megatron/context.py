"""Context parallelism: which of a packed row's tokens a rank computes. Pure.

The row is cut into two chunks a rank; a rank gets one from the front and its mirror image from the
back, since later tokens see more. A segment that crosses a cut becomes two, the second of which
continues the first: to attention that is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer_service.packed import ROOT, Int64Array, Segment


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One rank's part of a row.

    Attributes:
        segments: Of the whole row, none of which crosses a cut.
        own: Indices of those that the rank computes.
        tokens: int64, where in the row the rank's tokens lie, ascending.
    """

    segments: tuple[Segment, ...]
    own: tuple[int, ...]
    tokens: Int64Array


def part(segments: Sequence[Segment], ranks: int, rank: int) -> Part:
    """
    Args:
        segments: They cover a multiple of 2 * ranks tokens, or with one rank any number.
    """
    total = sum(segment.length for segment in segments)
    if ranks == 1:
        return Part(tuple(segments), tuple(range(len(segments))), np.arange(total, dtype=np.int64))
    size = total // (2 * ranks)
    cut = _cut(segments, size)
    chunks = np.arange(total, dtype=np.int64).reshape(2 * ranks, size)
    mine = (rank, 2 * ranks - 1 - rank)
    return Part(
        segments=cut,
        own=tuple(i for i, segment in enumerate(cut) if segment.start // size in mine),
        tokens=np.concatenate([chunks[chunk] for chunk in mine]),
    )


def _cut(segments: Sequence[Segment], size: int) -> tuple[Segment, ...]:
    """The segments, cut at multiples of `size`."""
    pieces: list[Segment] = []
    last_piece: list[int] = []
    for segment in segments:
        parent = ROOT if segment.parent == ROOT else last_piece[segment.parent]
        start, end = segment.start, segment.start + segment.length
        while start < end:
            stop = min(end, (start // size + 1) * size)
            pieces.append(Segment(start, stop - start, parent))
            parent, start = len(pieces) - 1, stop
        last_piece.append(parent)
    return tuple(pieces)
