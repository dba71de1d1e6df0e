"""What a critic adds to PPO: generalised advantages from its values, and its own loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leeway.algorithm import GaeConfig, GaeStep
from leeway.errors import DataError
from trainer_service.algorithms.tokens import select
from trainer_service.packed import Float64Array, PackedBatch, StepPlan


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


def estimate(
    rewards: npt.ArrayLike, values: npt.ArrayLike, turns: npt.ArrayLike, config: GaeConfig
) -> tuple[Float64Array, Float64Array]:
    """Advantages of one trajectory's trained tokens, and what their values should have been.

    A token's reward is its turn's, at the turn's last token. With turns as steps all tokens of a
    turn have its advantage, and only its first one, before which the state is valued, a return.

    Args:
        rewards: float [turns].
        values: float [tokens], the critic's value of the state before each.
        turns: int [tokens], each token's turn.

    Returns:
        float64 [tokens], and float64 [tokens], NaN where no step begins.

    Raises:
        DataError: See `gae` and `turn_steps`.
    """
    t = np.asarray(turns, dtype=np.int64)
    by_token = np.zeros(t.size)
    by_token[np.flatnonzero(np.diff(t, append=-1))] = rewards
    match config.step:
        case GaeStep.TOKEN:
            return gae(by_token, values, config.discount, config.lam)
        case GaeStep.TURN:
            of_turns, first = turn_steps(by_token, values, t)
            advantages, targets = gae(of_turns, first, config.discount, config.lam)
            returns = np.full(t.size, np.nan)
            returns[np.flatnonzero(np.diff(t, prepend=-1))] = targets
            return advantages[t], returns


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


class ValueLoss:
    """The critic's loss: `value_loss`, the mean over the steps of one optimizer step.

    Each call returns a micro-batch's share of it and adds to the diagnostics, so use one object for
    each step.
    """

    def __init__(self, plan: StepPlan, clip: float) -> None:
        """
        Args:
            plan: With values and returns.
            clip: How far a value may move from that at the start of the batch.

        Raises:
            DataError: The plan has no values.
        """
        self._clip = clip
        returns = []
        for batch in plan.microbatches:
            if batch.values is None or batch.returns is None:
                raise DataError("critic: the step lacks the values at the start of the batch")
            returns.append(batch.returns)
        self._steps = max(1, sum(int(np.isfinite(own).sum()) for own in returns))
        # Of steps: loss, clipped, value, return, return^2, error, error^2.
        self.sums = torch.zeros(7, dtype=torch.float64)

    def __call__(self, batch: PackedBatch, values: Tensor, _: Tensor, /) -> Tensor:
        """The scalar loss.

        Args:
            values: float [n], with gradient.
        """
        old, target = (
            torch.as_tensor(own, device=values.device) for own in (batch.values, batch.returns)
        )
        valid = values.detach().isfinite() & old.isfinite() & target.isfinite()
        losses = value_loss(values, old, target, valid, self._clip)
        loss = losses.sum() / self._steps
        clipped = losses.detach() > 0.5 * select(valid, values.detach() - target).square()
        now, wanted, error = (select(valid, x) for x in (old, target, target - old))
        sums = [loss, clipped, now, wanted, wanted.square(), error, error.square()]
        self.sums += torch.stack([own.detach().double().sum().cpu() for own in sums])
        return loss

    def metrics(self) -> Mapping[str, float]:
        """Over all micro-batches so far.

        value_loss_mean           over steps
        value_clip_fraction       steps at which the clip is active
        value_mean, return_mean   the critic's values at the start of the batch, and their targets
        value_explained_variance  1 - var(return - value) / var(return); 1 is a perfect critic
        """
        loss, clipped, value, target, square, error, error_square = (
            own / self._steps for own in self.sums.tolist()
        )
        spread = square - target**2
        left = error_square - error**2
        return {
            "value_loss_mean": loss * self._steps,
            "value_clip_fraction": clipped,
            "value_mean": value,
            "return_mean": target,
            "value_explained_variance": 1.0 - left / spread if spread > 1e-12 else 0.0,
        }


def mean_of(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a batch's optimizer steps, averaged."""
    return {name: sum(own[name] for own in steps) / len(steps) for own in steps[:1] for name in own}
