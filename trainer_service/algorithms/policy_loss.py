"""The decoupled PPO loss: clipped around the proximal policy, corrected for the behaviour policy.

Pure functions on tensors of one value a token, any shape, any float dtype. What must hold:
- The behaviour weight is always applied; there is no way to switch it off.
- A token outside the mask, or with a NaN or infinite log-probability, is selected away before any
  arithmetic, never multiplied by 0: it changes neither value nor gradient.
- No log-ratio, however extreme, gives NaN or infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp; beyond, their gradient is 0. exp(20) = 5e8 is past any
clip or cap, and far from overflow."""


class BehaviourAction(StrEnum):
    """What is done to a behaviour weight outside its bounds."""

    TRUNCATE = "truncate"
    MASK = "mask"


@dataclass(frozen=True, slots=True)
class BehaviourBounds:
    """Bounds of pi_prox / pi_behav.

    Above `cap` a weight is cut to the cap (TRUNCATE; AReaL, arXiv:2505.24298, section 5.2) or its
    token rejected (MASK). `floor` belongs to MASK: below it the token is rejected as well, which
    makes the band of IcePop.
    """

    action: BehaviourAction
    cap: float
    floor: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class BehaviourWeights:
    """Attributes, all of the tokens' shape and without gradient:

    raw: pi_prox / pi_behav; 1 where not valid.
    applied: After the bounds; 0 where rejected or not valid.
    valid: bool, tokens in the mask whose log-probabilities are finite.
    bounded: bool, valid tokens that were cut or rejected.
    """

    raw: Tensor
    applied: Tensor
    valid: Tensor
    bounded: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """Attributes, all of the tokens' shape:

    loss: With gradient to the current log-probabilities; exactly 0 for tokens that do not count.
    ratio: pi_theta / pi_prox, without gradient; 1 where not valid.
    clipped: bool, valid tokens at which the clip is active (no gradient).
    behaviour: The weights that were applied.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    behaviour: BehaviourWeights


def behaviour_weights(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, bounds: BehaviourBounds
) -> BehaviourWeights:
    """w = pi_prox / pi_behav = exp(proximal - behaviour), within the bounds.

    Args:
        proximal, behaviour: float [...], log-probabilities; no gradient flows through either.
        mask: bool [...], trained tokens.
    """
    proximal, behaviour = proximal.detach(), behaviour.detach()
    valid = mask & proximal.isfinite() & behaviour.isfinite()
    raw = _ratio(proximal, behaviour, valid)
    match bounds.action:
        case BehaviourAction.TRUNCATE:
            bounded = valid & (raw > bounds.cap)
            applied = raw.clamp(max=bounds.cap)
        case BehaviourAction.MASK:
            bounded = valid & ((raw > bounds.cap) | (raw < bounds.floor))
            applied = torch.where(bounded, torch.zeros_like(raw), raw)
    applied = torch.where(valid, applied, torch.zeros_like(applied))
    return BehaviourWeights(raw=raw, applied=applied, valid=valid, bounded=bounded)


def decoupled_ppo(
    logprobs: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    bounds: BehaviourBounds,
) -> PolicyLoss:
    """loss = -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) for each token.

    r = pi_theta / pi_prox, w = pi_prox / pi_behav within `bounds`: AReaL (arXiv:2505.24298, eq. 5),
    after Hilton et al. (arXiv:2110.00641, eq. 3); the asymmetric clip is DAPO's (arXiv:2503.14476,
    eq. 10). Sum it with the weights of `aggregation.token_weights`, whose denominators count
    rejected tokens.

    Args:
        logprobs: float [...], of the policy being optimised; carries the gradient.
        proximal: float [...], at the start of the batch. On the first step of a batch, `logprobs`.
        behaviour: float [...], of the policy that generated the tokens.
        advantages: float [...].
        mask: bool [...], trained tokens. Values elsewhere do not matter.
    """
    sound = mask & logprobs.detach().isfinite() & advantages.isfinite()
    weights = behaviour_weights(proximal, behaviour, sound, bounds)
    valid = weights.valid
    ratio = _ratio(logprobs, proximal.detach(), valid)
    advantage = torch.where(valid, advantages, torch.zeros_like(advantages))
    surrogate = torch.minimum(
        ratio * advantage, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage
    )
    with torch.no_grad():
        clipped = ((ratio > 1.0 + clip_high) & (advantage > 0)) | (
            (ratio < 1.0 - clip_low) & (advantage < 0)
        )
    return PolicyLoss(
        loss=-weights.applied * surrogate,
        ratio=ratio.detach(),
        clipped=clipped,
        behaviour=weights,
    )


def _ratio(numerator: Tensor, denominator: Tensor, valid: Tensor) -> Tensor:
    """exp(numerator - denominator), and 1 where not valid."""
    difference = torch.where(valid, numerator - denominator, torch.zeros_like(numerator))
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
