"""Micro-batches are of nearly equal cost on all ranks, and lose nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer_service.balance import Size, Spread, bins

SIZES = st.lists(
    st.integers(1, 60).flatmap(
        lambda tokens: st.integers(0, tokens**2).map(lambda pairs: Size(tokens, pairs))
    ),
    max_size=40,
)


@given(SIZES, st.integers(10, 80), st.integers(1, 5), st.sampled_from([0.0, 0.01, 1.0]))
def test_everything_is_in_one_bin_within_the_budget(
    sizes: list[Size], budget: int, ranks: int, pair_cost: float
) -> None:
    found = bins(sizes, budget, Spread(ranks, pair_cost))
    assert sorted(index for held in found for index in held) == list(range(len(sizes)))
    for held in found:
        assert len(held) == 1 or sum(sizes[index].tokens for index in held) <= budget
        assert held == sorted(held)


@given(SIZES, st.integers(10, 80), st.integers(2, 5))
def test_costlier_bins_come_first_so_that_rounds_are_alike(
    sizes: list[Size], budget: int, ranks: int
) -> None:
    spread = Spread(ranks, 0.01)
    costs = [
        sum(sizes[index].tokens + 0.01 * sizes[index].pairs for index in held)
        for held in bins(sizes, budget, spread)
    ]
    assert costs == sorted(costs, reverse=True)


def test_equal_tokens_are_not_equal_cost_where_attention_dominates() -> None:
    """One long sequence, as many tokens as eight short ones: attention makes it cost far more."""
    sizes = [Size(800, 800**2 // 2), *[Size(100, 100**2 // 2)] * 15]
    even = bins(sizes, 2300, Spread(2, 0.0))
    assert sorted(sum(sizes[index].tokens for index in held) for held in even) == [1100, 1200]
    by_attention = bins(sizes, 2300, Spread(2, 0.01))
    with_the_long = next(held for held in by_attention if 0 in held)
    assert with_the_long == [0]


def test_one_rank_takes_as_few_as_fit() -> None:
    assert bins([Size(30, 0), Size(50, 0), Size(20, 0)], 80, Spread()) == [[0, 1], [2]]
