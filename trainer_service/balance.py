"""Which sequences share a micro-batch, so that data-parallel ranks finish together. Pure.

Ranks compute one micro-batch each at a time and wait for the slowest. Tokens cost the same
everywhere but in attention, where each pays for every token before it: what balances short
sequences leaves long ones uneven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Spread:
    """Over what a step's micro-batches are spread.

    Attributes:
        ranks: Data-parallel ranks.
        pair_cost: What a token costs for each token that it sees, in tokens. A layer of width h
            computes 24 h^2 operations for a token and 4 h for a pair: 1 / (6 h).
    """

    ranks: int = 1
    pair_cost: float = 0.0


ONE_RANK = Spread()


class Size(NamedTuple):
    """Of what goes into a micro-batch as a whole."""

    tokens: int
    pairs: int


def bins(sizes: Sequence[Size], budget: int, spread: Spread) -> list[list[int]]:
    """Indices of what goes into each micro-batch.

    On one rank as few as fit. On more a multiple of the ranks where there is enough, of nearly
    equal cost, costlier ones first, so that those that are computed at a time are alike.

    Args:
        budget: Most tokens in a micro-batch; what is larger alone stays alone.
    """
    if spread.ranks == 1:
        return _first_fit(sizes, budget)
    cost = [size.tokens + spread.pair_cost * size.pairs for size in sizes]
    heaviest_first = sorted(range(len(sizes)), key=lambda index: (-cost[index], index))
    total = sum(min(size.tokens, budget) for size in sizes)
    count = spread.ranks * max(1, -(-total // (budget * spread.ranks)))
    while True:
        found = _lightest(heaviest_first, sizes, cost, budget, count)
        if found is not None:
            weight = [sum(cost[index] for index in held) for held in found]
            order = sorted(range(len(found)), key=lambda place: (-weight[place], found[place]))
            return [sorted(found[place]) for place in order if found[place]]
        count += spread.ranks


def _first_fit(sizes: Sequence[Size], budget: int) -> list[list[int]]:
    """Largest first; bins, and what they hold, in the order given."""
    found: list[tuple[int, list[int]]] = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index].tokens, index)):
        tokens = sizes[index].tokens
        for place, (filled, held) in enumerate(found):
            if filled + tokens <= budget:
                found[place] = (filled + tokens, [*held, index])
                break
        else:
            found.append((tokens, [index]))
    return sorted(sorted(held) for _, held in found)


def _lightest(
    order: Sequence[int], sizes: Sequence[Size], cost: Sequence[float], budget: int, count: int
) -> list[list[int]] | None:
    """Each into the bin that costs least so far among those with room; None if one has none."""
    held: list[list[int]] = [[] for _ in range(count)]
    tokens, costs = [0] * count, [0.0] * count
    for index in order:
        room = [
            place
            for place in range(count)
            if not held[place] or tokens[place] + sizes[index].tokens <= budget
        ]
        if not room:
            return None
        place = min(room, key=lambda place: (costs[place], place))
        held[place].append(index)
        tokens[place] += sizes[index].tokens
        costs[place] += cost[index]
    return held
