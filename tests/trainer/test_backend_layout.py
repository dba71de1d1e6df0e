"""A layout that cannot work is refused at start, with field, value and remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.errors import ConfigError
from trainer_service.backends.layout import Layout, ModelShape

MODEL = ModelShape(layers=12, heads=8, key_value_heads=4, intermediate=96, vocabulary=64, experts=8)


@pytest.mark.parametrize(
    ("text", "world", "expected"),
    [
        ("", 4, Layout(dp=4)),
        ("tp=2,pp=2,dp=1,ep=2", 4, Layout(tp=2, pp=2, ep=2)),
        (" tp=2 , cp=2,ep=2", 8, Layout(tp=2, cp=2, dp=2, ep=2)),
        ("ep=4", 4, Layout(dp=4, ep=4)),
    ],
)
def test_what_is_not_named_follows(text: str, world: int, expected: Layout) -> None:
    layout = Layout.parse(text, world)
    assert layout == expected
    assert layout.world == world
    layout.check(MODEL)


@pytest.mark.parametrize(
    ("text", "world", "message"),
    [
        ("tp=2,tp=2", 4, "tp=2' is not NAME=RANKS"),
        ("tp=0", 1, "'tp=0' is not"),
        ("fsdp=2", 2, "use each of tp, pp, dp, cp, ep"),
        ("tp=2,pp=2,dp=2", 4, "= 8, but the trainer has 4 ranks; .* leave dp out: it follows"),
        ("tp=3", 4, "= 3, but the trainer has 4 ranks; start a multiple of 3"),
        ("ep=3", 4, "ep = 3 does not divide tp [*] cp [*] dp = 4"),
    ],
)
def test_what_is_no_layout_is_refused(text: str, world: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Layout.parse(text, world)
    assert f"trainer.layout = {text!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("", [2, 4, 6, 8]),
        ("tp=2", [2, 4, 6, 8]),
        ("tp=2,pp=2", [4, 8]),
        ("dp=6", [6]),
        ("tp=2,ep=4", [4, 8]),
    ],
)
def test_a_layout_says_with_how_many_hosts_of_two_ranks_it_goes_on(
    text: str, ranks: list[int]
) -> None:
    assert Layout.allowed(text, step=2, most=8) == ranks


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=8), "tp = 8 does not divide the model's 4 key-value heads; use a divisor"),
        (Layout(pp=5), "pp = 5 does not divide the model's 12 layers"),
        (Layout(tp=2, dp=2), "ep = 1 with tp = 2: a model with experts needs ep to be a multiple"),
        (Layout(ep=3, dp=3), "ep = 3 does not divide the model's 8 experts"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused(layout: Layout, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout.check(MODEL)


def test_a_dense_model_has_no_experts_to_spread() -> None:
    dense = ModelShape(layers=2, heads=4, key_value_heads=2, intermediate=48, vocabulary=40)
    with pytest.raises(ConfigError, match="ep = 2 does not divide the model's 0 experts"):
        Layout(dp=2, ep=2).check(dense)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.integers(1, 4))
def test_a_line_says_what_it_was_made_of(tp: int, pp: int, dp: int) -> None:
    layout = Layout.parse(f"dp={dp},pp={pp},tp={tp}", tp * pp * dp)
    assert (layout.tp, layout.pp, layout.dp) == (tp, pp, dp)
    layout.check(replace(MODEL, experts=0))
