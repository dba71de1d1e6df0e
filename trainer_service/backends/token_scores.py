"""Log-probability and entropy of given tokens, straight from hidden states.

The head is most of a small model's memory: the logits of all positions are never built, only those
of trained tokens, a few rows at a time. What must hold: values and gradients are those of
`log_softmax(hidden @ head.T / temperature)`, and a token whose gradient is 0 contributes exactly 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20
"""Logits worked on at once: 4 MiB of float32 stay in a core's cache over the passes of a
softmax."""


class _TokenScores(torch.autograd.Function):
    """Keeps exp(logits - max) of all trained tokens, so that the backward pass needs no second
    product with the head: vocabulary x 4 bytes a token, less than a token's activations."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, vocabulary = hidden.shape[0], head.shape[0]
        exps = hidden.new_empty(rows, vocabulary, dtype=torch.float32)
        sums = hidden.new_empty(rows, 1, dtype=torch.float32)
        logprobs = hidden.new_empty(rows, dtype=torch.float32)
        entropy = hidden.new_empty(rows, dtype=torch.float32)
        chunk = max(1, CHUNK_ELEMENTS // vocabulary)
        scales = temperatures.reciprocal().unsqueeze(1)
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            logits = (hidden[part] @ head.T).float()
            if not bool((scales[part] == 1.0).all()):
                logits *= scales[part]
            logits -= logits.amax(dim=1, keepdim=True)
            exp = torch.exp(logits, out=exps[part])
            total = torch.sum(exp, dim=1, keepdim=True, out=sums[part])
            log_total = total.log().squeeze(1)
            logprobs[part] = logits.gather(1, targets[part, None]).squeeze(1) - log_total
            expected = torch.bmm(exp.unsqueeze(1), logits.unsqueeze(2)).flatten()
            entropy[part] = log_total - expected / total.squeeze(1)
        ctx.save_for_backward(hidden, head, targets, scales, exps, sums)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, head, targets, scales, exps, sums = ctx.saved_tensors
        grad = grad.unsqueeze(1) * scales
        # In place: the graph is walked once.
        exps.mul_(-grad / sums)
        exps.scatter_add_(1, targets.unsqueeze(1), grad)
        exps = exps.to(hidden.dtype)
        return exps @ head, exps.T @ hidden, None, None


def token_scores(
    hidden: Tensor, head: Tensor, targets: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """log_softmax(hidden @ head.T / temperature) at the targets, and its entropy in nats.

    Differentiable once, in `hidden` and `head`.

    Args:
        hidden: float [n, d].
        head: float [vocabulary, d].
        targets: int64 [n].
        temperatures: float32 [n], positive.

    Returns:
        float32 [n] log-probabilities with gradient, float32 [n] entropies without.
    """
    apply: Any = _TokenScores.apply
    logprobs, entropy = apply(hidden, head, targets, temperatures)
    return logprobs, entropy
