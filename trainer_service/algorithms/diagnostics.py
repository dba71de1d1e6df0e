"""What a person looks at to see whether off-policy learning is healthy.

`TokenSums` are sums and maxima over the tokens of one micro-batch; those of several add up, so that
the metrics depend neither on the split into micro-batches nor on that over ranks. Tokens outside
the mask are selected away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from leeway.algorithm import KlEstimator
from leeway.errors import ConfigError
from trainer_service.algorithms.correction import Correction
from trainer_service.algorithms.kl import kl
from trainer_service.algorithms.policy_loss import TokenLosses
from trainer_service.algorithms.tokens import Sequences, bounded


class Bound(NamedTuple):
    """Between the two a metric is healthy."""

    lowest: float
    highest: float


ALERTS: Mapping[str, Bound] = {
    "effective_sample_size": Bound(0.5, 1.0 + 1e-6),
    "chi2_token": Bound(-1.0, 1.0),
    "behaviour_weight_mean": Bound(0.5, 2.0),
    "cap_fraction": Bound(0.0, 0.05),
    "reject_fraction": Bound(0.0, 0.3),
    "clip_fraction": Bound(0.0, 0.3),
    "ratio_mean": Bound(0.8, 1.25),
    "mismatch_kl_k3_mean": Bound(0.0, 1e-3),
    "entropy_mean": Bound(0.01, float("inf")),
    "poisoned_tokens": Bound(0.0, 0.0),
}
"""Outside of these a person should look; docs/metrics.md says at what."""


MOST_MISMATCH_KL = 0.01
"""Engine and trainer compute the same numbers in different orders; more than this, in nats a token,
is another model, temperature or precision on one side."""


def engine_agrees(metrics: Mapping[str, float]) -> bool:
    """Whether engine and trainer were seen to hold the same numbers: the check of a first batch.

    False when no token was of the trainer's own version, so that nothing could be compared.

    Raises:
        ConfigError: They do not; every importance ratio would be wrong.
    """
    mismatch = metrics.get("mismatch_kl_k3_mean")
    if mismatch is not None and mismatch > MOST_MISMATCH_KL:
        raise ConfigError(
            f"engine and trainer disagree: KL {mismatch:.4f} nats a token on tokens of the "
            f"trainer's own version, bound {MOST_MISMATCH_KL}; see that both use the same model, "
            "temperature and precision"
        )
    return mismatch is not None


def alerts(metrics: Mapping[str, float]) -> dict[str, Bound]:
    """The metrics that are outside their bounds."""
    return {
        name: bound
        for name, bound in ALERTS.items()
        if name in metrics and not bound.lowest <= metrics[name] <= bound.highest
    }


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sums over valid tokens, unless a name says otherwise."""

    loss: float = 0.0
    masked_tokens: float = 0.0
    tokens: float = 0.0
    sequences: float = 0.0
    weight: float = 0.0
    weight_square: float = 0.0
    off_policy_max: float = 0.0
    off_policy_square: float = 0.0
    off_policy_sequence_square: float = 0.0
    off_policy_k1: float = 0.0
    off_policy_k3: float = 0.0
    perplexity_gap: float = 0.0
    bounded: float = 0.0
    rejected: float = 0.0
    ratio: float = 0.0
    ratio_max: float = 0.0
    clipped: float = 0.0
    entropy: float = 0.0
    fresh_tokens: float = 0.0
    fresh_k1: float = 0.0
    fresh_k3: float = 0.0
    reference_tokens: float = 0.0
    reference_kl: float = 0.0

    def __add__(self, other: TokenSums) -> TokenSums:
        def join(name: str) -> float:
            one, two = getattr(self, name), getattr(other, name)
            return float(max(one, two) if name.endswith("_max") else one + two)

        return TokenSums(**{field.name: join(field.name) for field in fields(self)})

    def metrics(self) -> dict[str, float]:
        """Means, fractions and maxima over the tokens that were computed.

        The off-policy ratio is pi_prox / pi_behav; with `proximal` = behaviour that of the policy
        at the start of the batch, or of the step where nothing scores the batch before.

        loss_sum                 aggregated loss
        effective_sample_size    (sum w)^2 / (n sum w^2) of the weights that apply, 0 to 1
        chi2_token, chi2_seq     mean squared off-policy ratio - 1, of tokens and of trajectories
        behaviour_weight_mean    the weights that apply
        behaviour_weight_max     the off-policy ratio's maximum, before its cap
        cap_fraction             tokens whose behaviour weight was cut or masked
        reject_fraction          tokens that a rejection rule left out
        off_policy_kl_k1_mean    estimates of KL(pi_behav || pi_prox) in nats a token
        off_policy_kl_k3_mean
        log_perplexity_gap_mean  mean over trajectories of log perplexity, trainer minus engine
        ratio_mean, ratio_max    pi_theta / pi_prox
        clip_fraction            tokens at which the loss's clip is active
        entropy_mean             nats a token
        poisoned_tokens          tokens left out for a NaN or infinite log-probability
        mismatch_kl_k1_mean      as off_policy_kl, over tokens that the trainer's own version
        mismatch_kl_k3_mean      generated: engine against trainer
        mismatch_tokens          how many those are; without any the two are left out
        reference_kl_mean        k3 of KL(pi_theta || reference), when there is a reference
        """
        n, trajectories = max(self.tokens, 1.0), max(self.sequences, 1.0)
        square = n * self.weight_square
        metrics = {
            "loss_sum": self.loss,
            "effective_sample_size": self.weight**2 / square if square else 0.0,
            "chi2_token": self.off_policy_square / n - 1.0 if self.tokens else 0.0,
            "chi2_seq": self.off_policy_sequence_square / trajectories - 1.0
            if self.sequences
            else 0.0,
            "behaviour_weight_mean": self.weight / n,
            "behaviour_weight_max": self.off_policy_max,
            "cap_fraction": self.bounded / n,
            "reject_fraction": self.rejected / n,
            "off_policy_kl_k1_mean": self.off_policy_k1 / n,
            "off_policy_kl_k3_mean": self.off_policy_k3 / n,
            "log_perplexity_gap_mean": self.perplexity_gap / trajectories,
            "ratio_mean": self.ratio / n,
            "ratio_max": self.ratio_max,
            "clip_fraction": self.clipped / n,
            "entropy_mean": self.entropy / n,
            "poisoned_tokens": self.masked_tokens - self.tokens,
            "mismatch_tokens": self.fresh_tokens,
        }
        if self.fresh_tokens:
            metrics["mismatch_kl_k1_mean"] = self.fresh_k1 / self.fresh_tokens
            metrics["mismatch_kl_k3_mean"] = self.fresh_k3 / self.fresh_tokens
        if self.reference_tokens:
            metrics["reference_kl_mean"] = self.reference_kl / self.reference_tokens
        return metrics


@torch.no_grad()
def token_sums(
    *,
    loss: Tensor,
    losses: TokenLosses,
    correction: Correction,
    weights: Tensor,
    off_policy: Tensor,
    reference: Tensor | None,
    entropy: Tensor,
    mask: Tensor,
    valid: Tensor,
    fresh: Tensor,
    sequences: Sequences,
) -> TokenSums:
    """Sums over the tokens of one micro-batch.

    Args:
        loss: float [], these tokens' share of the aggregated loss.
        losses, correction: What made it.
        weights: float [n], by which a token of the behaviour policy counts in all.
        off_policy: float [n], log pi_prox - log pi_behav within +-20, 0 where not valid.
        reference: float [n], log pi_theta - log pi_ref, 0 where not valid.
        entropy: float [n], of the current policy, in nats.
        mask: bool [n], trained tokens.
        valid: bool [n], those whose numbers are finite.
        fresh: bool [n], generated by the trainer's own version.
        sequences: Of these tokens.
    """
    own = valid & fresh
    k1, k3 = -off_policy, kl(KlEstimator.K3, -off_policy)
    used = sequences.lengths > 0
    of_sequences = bounded(sequences.sum(off_policy))[used].double()
    sums = {
        "loss": loss.detach(),
        "masked_tokens": mask.sum(),
        "tokens": valid.sum(),
        "sequences": used.sum(),
        "weight": weights[valid].double().sum(),
        "weight_square": weights[valid].double().square().sum(),
        "off_policy_max": _max(correction.raw[valid]),
        "off_policy_square": off_policy[valid].double().mul(2).exp().sum(),
        "off_policy_sequence_square": of_sequences.mul(2).exp().sum(),
        "off_policy_k1": k1[valid].double().sum(),
        "off_policy_k3": k3[valid].double().sum(),
        "perplexity_gap": sequences.mean(k1)[used].double().sum(),
        "bounded": correction.bounded.sum(),
        "rejected": correction.rejected.sum(),
        "ratio": losses.ratio[valid].double().sum(),
        "ratio_max": _max(losses.ratio[valid]),
        "clipped": losses.clipped.sum(),
        "entropy": entropy[valid].double().sum(),
        "fresh_tokens": own.sum(),
        "fresh_k1": k1[own].double().sum(),
        "fresh_k3": k3[own].double().sum(),
    }
    if reference is not None:
        sums["reference_tokens"] = valid.sum()
        sums["reference_kl"] = kl(KlEstimator.K3, reference)[valid].double().sum()
    # One transfer from the device for all.
    values = torch.stack([value.double() for value in sums.values()]).tolist()
    return TokenSums(**dict(zip(sums, values, strict=True)))


def _max(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_zeros(())
