"""Aggregation: how token losses become one number.

Every aggregation here is a weighted sum over tokens, and a token's weight depends on its trajectory
only. The weights are computed once over the whole optimizer step, before any token is rejected, and
travel with the tokens: neither padding nor the split into micro-batches can then change the loss.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from leeway.algorithm import Aggregation
from leeway.errors import DataError


def token_weights(
    aggregation: Aggregation, lengths: npt.ArrayLike, constant: int
) -> npt.NDArray[np.float64]:
    """Weight of each token of each trajectory, so that loss = sum of weight x token loss.

    With N trajectories that have a trained token, of L_i trained tokens:

    - token-mean (DAPO, arXiv:2503.14476, eq. 12): 1 / sum_j L_j
    - seq-mean-token-mean (GRPO, arXiv:2402.03300, eq. 3): 1 / (N L_i)
    - seq-mean-token-sum: 1 / N
    - constant (Dr. GRPO, arXiv:2503.20783, appendix G): 1 / (N constant)

    Args:
        lengths: int [trajectories], trained tokens of each.
        constant: Divisor of `constant`; the longest answer that may be sampled.

    Returns:
        float64 [trajectories]; 0 for one without trained tokens.

    Raises:
        DataError: A length is negative, or the constant is not positive.
    """
    n = np.asarray(lengths, dtype=np.int64)
    if n.size and n.min() < 0:
        raise DataError(f"lengths = {n.tolist()}: a trajectory has no fewer than 0 trained tokens")
    if constant < 1:
        raise DataError(f"constant = {constant}: divide by a positive number of tokens")
    used = n > 0
    if not used.any():
        return np.zeros(n.shape)
    trajectories = int(used.sum())
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            weights = np.full(n.shape, 1.0 / int(n.sum()))
        case Aggregation.SEQ_MEAN_TOKEN_MEAN:
            weights = 1.0 / (trajectories * np.maximum(n, 1))
        case Aggregation.SEQ_MEAN_TOKEN_SUM:
            weights = np.full(n.shape, 1.0 / trajectories)
        case Aggregation.CONSTANT:
            weights = np.full(n.shape, 1.0 / (trajectories * constant))
    return np.where(used, weights, 0.0)
