"""Log-probability and entropy of given tokens, straight from hidden states.

The head may be cut by vocabulary over ranks (tensor parallel): two small reductions then, and no
rank ever sees the others' logits.

The head is most of a small model's memory: the logits of all positions are never built, only those
of trained tokens, softmax a few rows at a time. What must hold: values and gradients are those of
`log_softmax(hidden @ head.T / temperature)`, and a token whose gradient is 0 contributes exactly 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
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
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        rows, vocabulary = hidden.shape[0], head.shape[0]
        exps = hidden.new_empty(rows, vocabulary, dtype=torch.float32)
        sums = hidden.new_empty(rows, 1, dtype=torch.float32)
        maxima = hidden.new_empty(rows, 1, dtype=torch.float32)
        expected = hidden.new_empty(rows, 1, dtype=torch.float32)
        scales = temperatures.reciprocal().unsqueeze(1)
        for start in range(0, rows, BLOCK_ROWS):
            part = slice(start, start + BLOCK_ROWS)
            if hidden.dtype is torch.float32:
                torch.mm(hidden[part], head.T, out=exps[part])
            else:
                exps[part] = hidden[part] @ head.T
        ours = torch.ones_like(targets, dtype=torch.bool)
        if group is not None:
            targets = targets - group.rank() * vocabulary
            ours = (targets >= 0) & (targets < vocabulary)
            targets = targets.where(ours, 0)
        logprobs = exps[predictions, targets] * scales[predictions, 0] * ours
        chunk = max(1, CHUNK_ELEMENTS // vocabulary)
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            logits = exps[part]
            logits *= scales[part]
            logits -= torch.amax(logits, dim=1, keepdim=True, out=maxima[part])
            exp = logits.exp()
            torch.sum(exp, dim=1, keepdim=True, out=sums[part])
            expected[part] = torch.bmm(exp.unsqueeze(1), logits.unsqueeze(2)).squeeze(2)
            exps[part] = exp
        # exps / sums is the softmax: with a cut head, sums are of all ranks, as seen from this one.
        if group is not None:
            own = maxima.clone()
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
            lower = (own - maxima).exp()
            totals = torch.cat([sums * lower, (expected + (own - maxima) * sums) * lower])
            dist.all_reduce(totals, group=group)
            dist.all_reduce(logprobs, group=group)
            of_all, expected = totals[:rows], totals[rows:]
            sums = of_all / lower
        else:
            of_all = sums
        entropy = (of_all.log() - expected / of_all)[predictions, 0]
        logprobs -= (maxima + of_all.log())[predictions, 0]
        ctx.save_for_backward(hidden, scales, predictions, targets, ours, exps, sums)
        ctx.head = head
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, scales, predictions, targets, ours, exps, sums = ctx.saved_tensors
        grad = grad * scales[predictions, 0]
        of_rows = grad.new_zeros(exps.shape[0]).index_add_(0, predictions, grad)
        # In place: the graph is walked once.
        exps.mul_(-of_rows.unsqueeze(1) / sums)
        exps.index_put_((predictions, targets), grad * ours, accumulate=True)
        exps = exps.to(hidden.dtype)
        if ctx.head.requires_grad:
            gradient = ctx.head.main_grad if hasattr(ctx.head, "main_grad") else ctx.head.grad
            if gradient is None:
                ctx.head.grad = exps.T @ hidden
            else:
                gradient.addmm_(exps.T.to(gradient.dtype), hidden.to(gradient.dtype))
        return exps @ ctx.head.detach(), None, None, None, None, None


def token_scores(
    hidden: Tensor,
    head: Tensor,
    temperatures: Tensor,
    predictions: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """log_softmax(hidden @ head.T / temperature) at the targets, and its entropy in nats.

    Differentiable once, in `hidden` and `head`. The head's gradient is added to `head.main_grad`
    (Megatron's) or `head.grad` in place: it is the largest one, and passing it through the graph
    would copy it.

    Args:
        hidden: float [r, d].
        head: float [vocabulary, d], a leaf; of the cut vocabulary with a group.
        temperatures: float32 [r], positive.
        predictions: int64 [n], which of the r hidden states predicts each target.
        targets: int64 [n].
        group: Ranks over which the vocabulary is cut in equal parts, in their order. The gradient
            in `hidden` is then of this rank's part; they add up to the whole.

    Returns:
        float32 [n] log-probabilities with gradient, float32 [n] entropies without.
    """
    apply: Any = _TokenScores.apply
    logprobs, entropy = apply(hidden, head, temperatures, predictions, targets, group)
    return logprobs, entropy
