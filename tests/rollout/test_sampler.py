"""Draws follow the distribution, its support, and nothing but (seed, position)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leeway.trajectory import Sampling
from rollout_service.engines.sampler import draw, uniforms


def uniform_grid(n: int) -> torch.Tensor:
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


@pytest.mark.parametrize("vocabulary", [5, 256, 257, 1000])
def test_draws_follow_the_distribution(vocabulary: int) -> None:
    torch.manual_seed(0)
    row = torch.randn(vocabulary) * 2
    n = 20_000
    tokens, logprobs = draw(row.repeat(n, 1), [Sampling()] * n, uniform_grid(n))
    expected = row.log_softmax(-1)
    counts = torch.bincount(torch.from_numpy(tokens), minlength=vocabulary) / n
    # A grid of n uniforms hits each token's interval to within one part in n.
    assert float((counts - expected.exp()).abs().max()) <= 1.5 / n
    np.testing.assert_allclose(logprobs, expected[tokens].numpy(), atol=1e-5)


def test_the_ends_of_the_unit_interval_never_draw_an_impossible_token() -> None:
    row = torch.full((600,), -torch.inf)
    row[[3, 400]] = 0.0
    ends = torch.tensor([0.0, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    tokens, logprobs = draw(row.repeat(2, 1), [Sampling()] * 2, ends)
    assert tokens.tolist() == [3, 400]
    np.testing.assert_allclose(logprobs, np.log(0.5), rtol=1e-6)


def test_greedy_takes_the_best_token_and_reports_it_at_temperature_one() -> None:
    row = torch.tensor([0.5, 2.0, 1.0])
    tokens, logprobs = draw(
        row[None].clone(), [Sampling(temperature=0.0, top_k=1)], uniform_grid(1)
    )
    assert tokens.tolist() == [1]
    np.testing.assert_allclose(logprobs, row.log_softmax(-1)[1].item(), rtol=1e-6)


@pytest.mark.parametrize(
    ("sampling", "support"),
    [
        (Sampling(top_k=2), [0, 1]),
        (Sampling(top_p=0.6), [0, 1]),
        (Sampling(top_p=0.5), [0]),
        (Sampling(top_k=3, top_p=0.9), [0, 1, 2]),
        (Sampling(top_k=2, top_p=0.6), [0]),
        (Sampling(top_p=1e-6), [0]),
        (Sampling(top_k=99), [0, 1, 2, 3]),
    ],
)
def test_log_probabilities_are_over_the_support(sampling: Sampling, support: list[int]) -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    n = 1000
    tokens, logprobs = draw(probabilities.log().repeat(n, 1), [sampling] * n, uniform_grid(n))
    assert sorted(set(tokens.tolist())) == support
    kept = probabilities[support] / probabilities[support].sum()
    np.testing.assert_allclose(logprobs, kept.log().numpy()[tokens], atol=1e-6)


def test_top_p_beyond_the_first_candidates_sorts_the_whole_vocabulary() -> None:
    row = torch.linspace(0.0, 0.001, 4000)
    n = 4000
    tokens, _ = draw(row.repeat(n, 1), [Sampling(top_p=0.5)] * n, uniform_grid(n))
    assert abs(len(set(tokens.tolist())) - 2000) <= 2
    assert tokens.min() >= 1998


def test_ties_at_the_threshold_stay_in_the_support() -> None:
    row = torch.zeros(4)
    _, logprobs = draw(row.repeat(8, 1), [Sampling(top_k=2)] * 8, uniform_grid(8))
    np.testing.assert_allclose(logprobs, np.log(0.25), rtol=1e-6)


def test_temperature_scales_before_the_support_is_taken() -> None:
    row = torch.tensor([1.0, 0.0, -1.0])
    sampling = Sampling(temperature=0.5, top_k=2)
    tokens, logprobs = draw(row[None].clone(), [sampling], torch.tensor([0.01]).double())
    assert tokens.tolist() == [0]
    np.testing.assert_allclose(logprobs, torch.tensor([2.0, 0.0]).log_softmax(-1)[0], rtol=1e-6)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(1)
    logits = torch.randn(11, 777)
    samplings = [Sampling(temperature=1.0 + 0.1 * i, top_k=i) for i in range(11)]
    uniform = uniform_grid(11)
    together = draw(logits.clone(), samplings, uniform)
    for row in range(11):
        alone = draw(logits[row : row + 1].clone(), samplings[row : row + 1], uniform[row, None])
        assert alone[0][0] == together[0][row]
        np.testing.assert_allclose(alone[1][0], together[1][row], atol=1e-6)


def test_uniforms_are_fixed_and_even() -> None:
    """The constants pin the generator: another node, or a later release, draws the same tokens."""
    few = uniforms(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 0, 5], np.uint64))
    assert few.tolist() == [0.6524484863740322, 0.36818951565166946, 0.15403342580516755]
    n = 100_000
    for seeds, positions in (
        (np.arange(n, dtype=np.uint64), np.zeros(n, np.uint64)),
        (np.zeros(n, np.uint64), np.arange(n, dtype=np.uint64)),
    ):
        values = uniforms(seeds, positions).numpy()
        assert 0.0 <= values.min() < values.max() < 1.0
        counts = np.bincount((values * 100).astype(int), minlength=100)
        assert np.square(counts - n / 100).sum() / (n / 100) < 160  # chi-squared, 99 degrees
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02
