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
        chunk = _chunk_rows(vocabulary)
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
        entropy = of_all.log() - expected / of_all
        logprobs -= (maxima + of_all.log())[predictions, 0]
        ctx.save_for_backward(hidden, scales, predictions, targets, ours, exps, sums, entropy)
        ctx.head = head
        # A loss without an entropy bonus pays nothing for its gradient.
        ctx.set_materialize_grads(False)
        return logprobs, entropy[predictions, 0]

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, scales, predictions, targets, ours, exps, sums, entropy = ctx.saved_tensors

        def of_rows(of_tokens: Tensor) -> Tensor:
            summed: Tensor = sums.new_zeros(sums.shape[0]).index_add_(0, predictions, of_tokens)
            return summed.unsqueeze(1)

        scale = scales[predictions, 0]
        grad = scale.new_zeros(scale.shape) if grad is None else grad * scale
        # In place: the graph is walked once.
        slopes = -of_rows(grad) / sums
        if of_entropy is None or not of_entropy.any():
            exps.mul_(slopes)
        else:
            # d entropy / d logit = -p (log p + entropy), with p = exps / sums
            of_entropies = of_rows(of_entropy * scale) / sums
            chunk = _chunk_rows(exps.shape[1])
            for start in range(0, exps.shape[0], chunk):
                part = slice(start, start + chunk)
                logs = (exps[part] / sums[part]).clamp(min=torch.finfo(exps.dtype).tiny).log()
                exps[part] *= slopes[part] - of_entropies[part] * (logs + entropy[part])
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

    Both are differentiable once, in `hidden` and `head`. The head's gradient is added to
    `head.main_grad` (Megatron's) or `head.grad` in place: it is the largest one, and passing it
    through the graph would copy it.

    Args:
        hidden: float [r, d].
        head: float [vocabulary, d], a leaf; of the cut vocabulary with a group.
        temperatures: float32 [r], positive.
        predictions: int64 [n], which of the r hidden states predicts each target.
        targets: int64 [n].
        group: Ranks over which the vocabulary is cut in equal parts, in their order. The gradient
            in `hidden` is then of this rank's part; they add up to the whole.

    Returns:
        float32 [n] log-probabilities, float32 [n] entropies.
    """
    apply: Any = _TokenScores.apply
    logprobs, entropy = apply(hidden, head, temperatures, predictions, targets, group)
    return logprobs, entropy


def _chunk_rows(vocabulary: int) -> int:
    return max(1, CHUNK_ELEMENTS // vocabulary)
