"""Log-probability and entropy of given tokens, straight from hidden states.

The head is most of a small model's memory: the logits of all positions are never built, only those
of trained tokens, softmax a few rows at a time. What must hold: values and gradients are those of
`log_softmax(hidden @ head.T / temperature)`, and a token whose gradient is 0 contributes exactly 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK_ROWS = 256
"""Rows multiplied with the head at once: enough for a matrix product at full speed."""
CHUNK_ELEMENTS = 1 << 19
"""Logits passed over at once: 2 MiB of float32 stay in a core's cache during a softmax."""


class _TokenScores(torch.autograd.Function):
    """Keeps exp(logits - max) of all rows, so that the backward pass needs no second product with
    the head: vocabulary x 4 bytes a row, less than a token's activations."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        temperatures: Tensor,
        predictions: Tensor,
        targets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rows, vocabulary = hidden.shape[0], head.shape[0]
        exps = hidden.new_empty(rows, vocabulary, dtype=torch.float32)
        sums = hidden.new_empty(rows, 1, dtype=torch.float32)
        maxima = hidden.new_empty(rows, 1, dtype=torch.float32)
        entropy = hidden.new_empty(rows, dtype=torch.float32)
        scales = temperatures.reciprocal().unsqueeze(1)
        for start in range(0, rows, BLOCK_ROWS):
            part = slice(start, start + BLOCK_ROWS)
            torch.mm(hidden[part], head.T, out=exps[part])
        logprobs = exps[predictions, targets] * scales[predictions, 0]
        chunk = max(1, CHUNK_ELEMENTS // vocabulary)
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            logits = exps[part]
            logits *= scales[part]
            logits -= torch.amax(logits, dim=1, keepdim=True, out=maxima[part])
            exp = logits.exp()
            total = torch.sum(exp, dim=1, keepdim=True, out=sums[part])
            expected = torch.bmm(exp.unsqueeze(1), logits.unsqueeze(2)).flatten()
            entropy[part] = (total.log() - expected.unsqueeze(1) / total).squeeze(1)
            exps[part] = exp
        logprobs -= (maxima + sums.log())[predictions, 0]
        entropy = entropy[predictions]
        ctx.save_for_backward(hidden, scales, predictions, targets, exps, sums)
        ctx.head = head
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        hidden, scales, predictions, targets, exps, sums = ctx.saved_tensors
        grad = grad * scales[predictions, 0]
        of_rows = grad.new_zeros(exps.shape[0]).index_add_(0, predictions, grad)
        # In place: the graph is walked once.
        exps.mul_(-of_rows.unsqueeze(1) / sums)
        exps.index_put_((predictions, targets), grad, accumulate=True)
        exps = exps.to(hidden.dtype)
        head = ctx.head.detach()
        if ctx.head.grad is None:
            ctx.head.grad = exps.T @ hidden
        else:
            ctx.head.grad.addmm_(exps.T, hidden)
        return exps @ head, None, None, None, None


def token_scores(
    hidden: Tensor, head: Tensor, temperatures: Tensor, predictions: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """log_softmax(hidden @ head.T / temperature) at the targets, and its entropy in nats.

    Differentiable once, in `hidden` and `head`. The head's gradient is added to `head.grad` in
    place: it is the largest one, and passing it through the graph would copy it.

    Args:
        hidden: float [r, d].
        head: float [vocabulary, d], a leaf.
        temperatures: float32 [r], positive.
        predictions: int64 [n], which of the r hidden states predicts each target.
        targets: int64 [n].

    Returns:
        float32 [n] log-probabilities with gradient, float32 [n] entropies without.
    """
    apply: Any = _TokenScores.apply
    logprobs, entropy = apply(hidden, head, temperatures, predictions, targets)
    return logprobs, entropy
