"""Losses of steps that need no rollout: supervised fine-tuning and preference optimisation.

They are `Loss`es for a backend, as `Objective` is, over the same packed batches: `weights` are
those of the aggregation, `advantages` say which side a token is on. What must hold: the split into
micro-batches does not matter, and a token without a finite log-probability is selected away.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leeway.errors import DataError
from trainer_service.algorithms.tokens import select
from trainer_service.batching import PackedBatch, StepPlan


class Supervised:
    """loss = - sum of weight x log pi_theta: what the demonstrations' tokens cost, in nats."""

    def __init__(self) -> None:
        self._loss = 0.0

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """The scalar loss."""
        weights = _tensor(batch.weights, logprobs)
        loss = -(weights * select(logprobs.detach().isfinite(), logprobs)).sum()
        self._loss += float(loss.detach())
        return loss

    def metrics(self) -> dict[str, float]:
        """loss_mean: in nats a token, averaged as the aggregation says."""
        return {"loss_mean": self._loss}


class Preference:
    """Direct preference optimisation (arXiv:2305.18290, eq. 7).

        loss = - mean over pairs of log sigmoid(beta (margin chosen - margin rejected))

    with margin = the sum over an answer's tokens of log pi_theta - log pi_ref. Trajectories 2k and
    2k + 1 of a step are the answers of pair k; their advantages are 1 (chosen) and -1 (rejected),
    and a token's weight is 1 / pairs.

    A step is one update, so that its gradient is that of the step's start: eq. 8 there, each
    token's log-probability times beta sigmoid(-difference), which is known beforehand. The answers
    of a pair may thus lie in different micro-batches, and on different ranks.
    """

    def __init__(self, plan: StepPlan, beta: float) -> None:
        """
        Args:
            plan: The step, with the log-probabilities at its start and the reference's.

        Raises:
            DataError: It lacks either.
        """
        self._beta = beta
        pairs: dict[int, float] = defaultdict(float)
        for batch in plan.microbatches:
            if batch.proximal is None or batch.reference is None:
                raise DataError("preference: the step was not scored by policy and reference")
            margins = batch.advantages * (batch.proximal.astype(np.float64) - batch.reference)
            for pair, margin in zip(batch.sequences // 2, margins, strict=True):
                pairs[int(pair)] += float(margin) if np.isfinite(margin) else 0.0
        self._differences = {pair: beta * margin for pair, margin in pairs.items()}

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """A scalar with the loss's gradient."""
        differences = [self._differences[int(pair)] for pair in batch.sequences // 2]
        slopes = self._beta * torch.sigmoid(-torch.tensor(differences, dtype=logprobs.dtype))
        weights = slopes.to(logprobs.device) * _tensor(batch.weights * batch.advantages, logprobs)
        reference = _tensor(np.asarray(batch.reference), logprobs)
        valid = logprobs.detach().isfinite() & reference.isfinite()
        return -(weights * select(valid, logprobs)).sum()

    def metrics(self) -> dict[str, float]:
        """loss_mean, margin_mean (the difference times beta) and accuracy_mean, over pairs."""
        differences = np.array(list(self._differences.values()))
        return {
            "loss_mean": float(np.logaddexp(0.0, -differences).mean()),
            "margin_mean": float(differences.mean()),
            "accuracy_mean": float((differences > 0).mean()),
        }


def _tensor(values: npt.NDArray[Any], like: Tensor) -> Tensor:
    return torch.as_tensor(values, device=like.device)
