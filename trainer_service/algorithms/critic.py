"""What a critic adds to PPO: generalised advantages from its values, and its own loss."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leeway.errors import DataError
from trainer_service.algorithms.tokens import select

Float64Array = npt.NDArray[np.float64]


def gae(
    rewards: npt.ArrayLike, values: npt.ArrayLike, discount: float, lam: float
) -> tuple[Float64Array, Float64Array]:
    """Generalised advantages and returns of one trajectory's steps, which are tokens or turns.

    delta_t = r_t + discount V_{t+1} - V_t, A_t = delta_t + discount lam A_{t+1}, with V = 0 behind
    the last step; the return is A_t + V_t (arXiv:1506.02438, eq. 16).

    Args:
        rewards: float [steps], for taking each step.
        values: float [steps], the critic's value of the state before each.

    Returns:
        float64 [steps] advantages, not whitened, and float64 [steps] returns.

    Raises:
        DataError: The lengths differ, or a number is not finite.
    """
    r = np.asarray(rewards, dtype=np.float64)
    v = np.asarray(values, dtype=np.float64)
    if r.ndim != 1 or r.shape != v.shape or not np.isfinite([r, v]).all():
        raise DataError(
            f"rewards {list(r.shape)}, values {list(v.shape)}: give finite numbers, [steps]"
        )
    advantages = np.zeros_like(r)
    advantage = following = 0.0
    for step in range(r.size - 1, -1, -1):
        advantage = r[step] + discount * following - v[step] + discount * lam * advantage
        following = v[step]
        advantages[step] = advantage
    return advantages, advantages + v


def turn_steps(
    rewards: npt.ArrayLike, values: npt.ArrayLike, turns: npt.ArrayLike
) -> tuple[Float64Array, Float64Array]:
    """Makes each turn one step: its tokens' rewards added up, the value before its first token.

    Spread what `gae` gives over the tokens by `advantages[turns]`.

    Args:
        rewards, values: float [tokens], of trained tokens.
        turns: int [tokens], each token's turn, 0, 1, ... in order.

    Raises:
        DataError: `turns` does not count up from 0.
    """
    t = np.asarray(turns, dtype=np.int64)
    r = np.asarray(rewards, dtype=np.float64)
    if t.shape != r.shape or (t.size and t[0] != 0) or not np.isin(np.diff(t), (0, 1)).all():
        raise DataError(f"turns = {t.tolist()}: give one number a token, counting up from 0")
    first = np.flatnonzero(np.diff(t, prepend=-1))
    summed = np.bincount(t, weights=r).astype(np.float64)
    return summed, np.asarray(values, dtype=np.float64)[first]


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, valid: Tensor, clip: float
) -> Tensor:
    """0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) of each token.

    PPO's clipped value loss (arXiv:2005.12729, section 3). Aggregate it like a policy loss.

    Args:
        values: float [...], with gradient.
        old_values: float [...], at the start of the batch.
        returns: float [...].
        valid: bool [...]; 0 elsewhere.
    """
    new, old, target = (select(valid, x) for x in (values, old_values, returns))
    moved = old + (new - old).clamp(-clip, clip)
    return 0.5 * torch.maximum((new - target).square(), (moved - target).square())
