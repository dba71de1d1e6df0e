"""Policy losses: one token's loss from its log-probabilities and advantage.

r = pi_theta / pi_prox, A the advantage, both of a token; sg() stops the gradient. A loss here says
nothing of how stale the data is: `correction` weighs it, `aggregation` averages it. Clips are those
of `PolicyConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leeway.algorithm import PolicyConfig, PolicyLoss
from trainer_service.algorithms.tokens import Sequences, bounded, log_ratio, select

DPPO_RATIO_CAP = 20.0
"""DPPO truncates the ratio here, as its authors do; the mask bounds the update."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """Attributes, all [n]:

    loss: With gradient to the current log-probabilities; exactly 0 for tokens that do not count.
    ratio: pi_theta / pi_prox, without gradient; 1 where not valid.
    clipped: bool, valid tokens whose gradient the loss's bound stops or shortens.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def token_losses(
    policy: PolicyConfig,
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    valid: Tensor,
    sequences: Sequences,
) -> TokenLosses:
    """The policy loss of each token.

    - ppo: -min(r A, clip(r, 1 - low, 1 + high) A) (arXiv:1707.06347, eq. 7; asymmetric after DAPO,
      arXiv:2503.14476, eq. 10); where A < 0 at most -dual_clip A (arXiv:1912.09729)
    - reinforce: -r A, the importance-weighted policy gradient
    - gspo: ppo with the sequence's geometric mean ratio (GSPO-token, arXiv:2507.18071, section 4.3)
    - geo_mean: -A times the geometric mean of ratios, each clipped (GMPO, arXiv:2507.20673)
    - cispo: -sg(clip(r, 1 - low, 1 + high)) A log pi_theta (MiniMax-M1, arXiv:2506.13585,
      section 3.1)
    - sapo: -4 sigmoid(tau (r - 1)) / tau A, tau by the sign of A (arXiv:2511.20347)
    - aipo: -sg(min(r, 1 + high)) A log pi_theta (LlamaRL, arXiv:2505.24034)
    - dppo: -sg(min(r, 20)) A log pi_theta, but 0 where pi_theta - pi_prox is above high with A > 0,
      or below -low with A <= 0 (arXiv:2602.04879, binary total variation)

    Args:
        logprobs: float [n], of the policy being optimised; carries the gradient.
        proximal: float [n], of the policy to stay near.
        advantages: float [n].
        valid: bool [n]. Values elsewhere do not matter.
        sequences: Of these tokens.
    """
    proximal = proximal.detach()
    logs = log_ratio(logprobs, proximal, valid)
    ratio = logs.exp()
    advantage = select(valid, advantages)
    gained, lost = advantage > 0, advantage < 0
    low, high = policy.clips
    stopped = ratio.detach()
    match policy.loss:
        case PolicyLoss.PPO:
            loss, clipped = _clipped_surrogate(ratio, advantage, low, high)
            if policy.dual_clip is not None:
                bound = -policy.dual_clip * advantage
                clipped = clipped | (lost & (loss > bound))
                loss = torch.where(lost, torch.minimum(loss, bound), loss)
        case PolicyLoss.REINFORCE:
            loss, clipped = -ratio * advantage, torch.zeros_like(valid)
        case PolicyLoss.GSPO:
            of_sequence = sequences.spread(sequences.mean(logs.detach()))
            own = bounded(logs - logs.detach() + of_sequence).exp()
            loss, clipped = _clipped_surrogate(own, advantage, low, high)
        case PolicyLoss.GEO_MEAN:
            sign = advantage.sign()
            clipped = (gained & (logs > high)) | (lost & (logs < -low))
            kept = sign * torch.minimum(sign * logs, sign * logs.clamp(-low, high))
            loss = -advantage * sequences.spread(bounded(sequences.mean(kept)).exp())
        case PolicyLoss.CISPO:
            weight = stopped.clamp(1.0 - low, 1.0 + high)
            loss, clipped = -weight * advantage * select(valid, logprobs), weight != stopped
        case PolicyLoss.SAPO:
            tau = torch.where(gained, policy.tau_positive, policy.tau_negative).to(ratio.dtype)
            loss = -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantage
            clipped = torch.zeros_like(valid)
        case PolicyLoss.AIPO:
            weight = stopped.clamp(max=1.0 + high)
            loss, clipped = -weight * advantage * select(valid, logprobs), weight != stopped
        case PolicyLoss.DPPO:
            moved = select(valid, logprobs.detach().exp() - proximal.exp())
            clipped = valid & torch.where(gained, moved > high, moved < -low)
            weight = stopped.clamp(max=DPPO_RATIO_CAP)
            loss = -weight * advantage * select(valid & ~clipped, logprobs)
    return TokenLosses(loss=loss, ratio=stopped, clipped=clipped & valid)


def _clipped_surrogate(
    ratio: Tensor, advantage: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A), and where the clip stops the gradient."""
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1.0 - low, 1.0 + high) * advantage)
    clipped = ((ratio > 1.0 + high) & (advantage > 0)) | ((ratio < 1.0 - low) & (advantage < 0))
    return -surrogate, clipped.detach()
