"""Scores and their gradients are those of a softmax over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_service.backends.token_scores import token_scores


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), temperature=st.floats(0.3, 3.0), sharp=st.floats(0.1, 200.0))
@pytest.mark.parametrize("of_entropy", [0.0, 1.0])
def test_gradients_are_those_of_a_softmax(
    of_entropy: float, seed: int, temperature: float, sharp: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, tokens, vocabulary = 5, 8, 11
    hidden = sharp * torch.randn(rows, 4, generator=generator)
    head = torch.randn(vocabulary, 4, generator=generator)
    predictions = torch.randint(rows, (tokens,), generator=generator)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    slopes = torch.randn(2, tokens, generator=generator)
    gradients = []
    for own in (True, False):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        if own:
            logprobs, entropy = token_scores(
                h, w, torch.full((rows,), temperature), predictions, targets
            )
        else:
            scores = (h @ w.T / temperature).double().log_softmax(dim=-1)[predictions]
            logprobs = scores.gather(1, targets[:, None]).squeeze(1)
            entropy = -(scores.exp() * scores).sum(dim=1)
        loss = (slopes[0] * logprobs).sum()
        if of_entropy:
            loss = loss + of_entropy * (slopes[1] * entropy).sum()
        torch.autograd.backward(loss)
        gradients.append((h.grad, w.grad))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
