"""Losses of steps that need no rollout: supervised fine-tuning and preference optimisation.

They are `Loss`es for a backend, as `Objective` is, over the same packed batches: `weights` are
those of the aggregation, `advantages` say which side a token is on. What must hold: the split into
micro-batches does not matter, and a token without a finite log-probability is selected away.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leeway.errors import DataError
from trainer_service.algorithms.tokens import Sequences, select
from trainer_service.packed import PackedBatch


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
    2k + 1 of a step are the answers of pair k, in one micro-batch; their advantages are 1 (chosen)
    and -1 (rejected), and a token's weight is 1 / pairs.
    """

    def __init__(self, beta: float) -> None:
        self._beta = beta
        self._loss = self._margin = self._accuracy = 0.0

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """The scalar loss.

        Raises:
            DataError: The batch was not scored by the reference, or one half of a pair is missing.
        """
        if batch.reference is None:
            raise DataError("preference: the batch lacks the reference's log-probabilities")
        reference = _tensor(batch.reference, logprobs)
        sequences, sides = _tensor(batch.sequences, logprobs), _tensor(batch.advantages, logprobs)
        if np.unique(batch.sequences).size != 2 * np.unique(batch.sequences // 2).size:
            raise DataError("preference: the answers of a pair are in different micro-batches")
        valid = logprobs.detach().isfinite() & reference.isfinite()
        pairs = Sequences(sequences // 2, valid)
        differences = self._beta * pairs.sum(sides * select(valid, logprobs - reference))
        weights = pairs.mean(_tensor(batch.weights, logprobs))
        loss = -(weights * torch.nn.functional.logsigmoid(differences)).sum()
        self._loss += float(loss.detach())
        self._margin += float((weights * differences.detach()).sum())
        self._accuracy += float((weights * (differences.detach() > 0)).sum())
        return loss

    def metrics(self) -> dict[str, float]:
        """loss_mean, margin_mean (the difference times beta) and accuracy_mean, over pairs."""
        return {
            "loss_mean": self._loss,
            "margin_mean": self._margin,
            "accuracy_mean": self._accuracy,
        }


def _tensor(values: npt.NDArray[Any], like: Tensor) -> Tensor:
    return torch.as_tensor(values, device=like.device)
