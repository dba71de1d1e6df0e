"""Estimates of a KL divergence from the log-probabilities of sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from leeway.algorithm import KlEstimator
from trainer_service.algorithms.tokens import bounded


def kl(estimator: KlEstimator, log_ratio: Tensor) -> Tensor:
    """An estimate of KL(p || q) for each token.

    With l = log p - log q of a token drawn from p (Schulman, "Approximating KL divergence", 2020):

    - k1 = l: unbiased, of either sign
    - abs = |l|
    - k2 = l^2 / 2: its gradient on p's own tokens is the KL's
    - k3 = exp(-l) - 1 + l: unbiased, never negative

    Args:
        log_ratio: float [...], l; 0 for tokens that do not count. Differentiable.
    """
    ratio = bounded(log_ratio)
    match estimator:
        case KlEstimator.K1:
            return ratio
        case KlEstimator.ABS:
            return ratio.abs()
        case KlEstimator.K2:
            return 0.5 * ratio.square()
        case KlEstimator.K3:
            return torch.expm1(-ratio) + ratio
