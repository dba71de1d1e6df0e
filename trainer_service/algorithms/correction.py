"""Off-policy corrections: how much a token counts that another policy generated.

Composable with every policy loss, whose tokens they multiply. Without gradient: a correction
changes the measure, not the objective. Denominators of the aggregation count rejected tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leeway.algorithm import (
    AlgorithmConfig,
    BoundAction,
    KlEstimator,
    Level,
    Proximal,
    RejectConfig,
    RejectLevel,
    WeightConfig,
)
from trainer_service.algorithms.kl import kl
from trainer_service.algorithms.tokens import MAX_LOG_RATIO, Sequences, bounded, select


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """Attributes, all [n] and without gradient:

    raw: The off-policy ratio at the weight's level, before any bound; 1 where not valid.
    applied: What multiplies the token's loss; 0 where masked, rejected or not valid.
    bounded: bool, valid tokens whose weight was cut or masked.
    rejected: bool, valid tokens that a rule left out.
    """

    raw: Tensor
    applied: Tensor
    bounded: Tensor
    rejected: Tensor


def correct(
    algorithm: AlgorithmConfig,
    logs: Tensor,
    advantages: Tensor,
    valid: Tensor,
    sequences: Sequences,
    largest: float,
) -> Correction:
    """The behaviour weight and the rejections of a configuration.

    With `proximal` = behaviour the loss's own ratio is the weight, and only rejections are left.

    Args:
        logs: float [n], log pi_prox - log pi_behav within +-20, 0 where not valid; for `proximal` =
            behaviour that of the policy at the start of the batch.
        advantages: float [n].
        largest: From `second_moment_bound`, or infinity.
    """
    if algorithm.proximal is Proximal.BEHAVIOUR:
        raw, applied = logs.exp(), select(valid, torch.ones_like(logs))
        outside = torch.zeros_like(valid)
    else:
        raw, applied, outside = behaviour_weights(algorithm.weight, logs, valid, sequences)
    out = rejected(algorithm.reject, logs, advantages, valid, sequences)
    out = out | (valid & (logs.abs() > largest))
    return Correction(raw, select(~out, applied), outside, out)


def behaviour_weights(
    config: WeightConfig, logs: Tensor, valid: Tensor, sequences: Sequences
) -> tuple[Tensor, Tensor, Tensor]:
    """w = pi_prox / pi_behav before and after its bounds, and where these held.

    Truncated: min(w, cap) (TIS; as the decoupled loss's weight AReaL, arXiv:2505.24298, section
    5.2). Masked: w, and 0 outside [floor, cap] (at token level IcePop's band).
    `sequence`: w is the product over the trajectory; `geometric`: its length-th root.

    Args:
        logs: float [n], log pi_prox - log pi_behav within +-20, 0 where not valid.

    Returns:
        float [n], 1 where not valid; float [n], 0 where masked or not valid; bool [n].
    """
    match config.level:
        case Level.TOKEN:
            raw = logs.exp()
        case Level.SEQUENCE:
            raw = bounded(sequences.spread(sequences.sum(logs))).exp()
        case Level.GEOMETRIC:
            raw = sequences.spread(sequences.mean(logs)).exp()
    match config.action:
        case BoundAction.TRUNCATE:
            outside = raw > config.cap
            applied = raw.clamp(max=config.cap)
        case BoundAction.MASK:
            outside = (raw > config.cap) | (raw < config.floor)
            applied = torch.where(outside, 0.0, raw)
    return torch.where(valid, raw, 1.0), select(valid, applied), valid & outside


def rejected(
    rules: Sequence[RejectConfig],
    logs: Tensor,
    advantages: Tensor,
    valid: Tensor,
    sequences: Sequences,
) -> Tensor:
    """bool [n], valid tokens that one of the rules leaves out.

    The measure is an estimate of KL(pi_behav || pi_prox) from behaviour's tokens, of each token or
    summed, averaged or maximised over the trajectory, which then goes as a whole. For k1 the bounds
    are those of exp(k1) = pi_behav / pi_prox, and `seq_max` looks at both ends. `seq_mean` of k1
    with an upper bound and `negative_only` is DeepSeek-V3.2's off-policy sequence mask
    (arXiv:2512.02556, section 3.1).

    Args:
        logs: As for `behaviour_weights`.
        advantages: float [n].
    """
    out = torch.zeros_like(valid)
    for rule in rules:
        values = kl(rule.measure, -logs)
        lower, upper = rule.lower, rule.upper
        if rule.measure is KlEstimator.K1:
            lower, upper = (None if bound is None else math.log(bound) for bound in (lower, upper))
        lower = -math.inf if lower is None else lower
        upper = math.inf if upper is None else upper
        match rule.level:
            case RejectLevel.TOKEN:
                outside = (values > upper) | (values < lower)
            case RejectLevel.SEQ_SUM | RejectLevel.SEQ_MEAN:
                reduce = sequences.sum if rule.level is RejectLevel.SEQ_SUM else sequences.mean
                measure = sequences.spread(reduce(values))
                outside = (measure > upper) | (measure < lower)
            case RejectLevel.SEQ_MAX:
                highest, lowest = sequences.max(values), -sequences.max(-values)
                outside = sequences.spread((highest > upper) | (lowest < lower))
        if rule.negative_only:
            outside = outside & (advantages < 0)
        out = out | outside
    return out & valid


def second_moment_bound(log_ratios: npt.ArrayLike, most: float) -> float:
    """The largest |log pi_prox/pi_behav| that a token of this step may have.

    M2PO (arXiv:2510.01161, algorithm 1): the tokens with the largest squares are left out until the
    mean square of the rest is at most `most`. Tokens of equal size stay or go together. One number
    for the whole optimizer step, so that its split into micro-batches cannot matter.

    Args:
        log_ratios: float [tokens], all trained tokens of the step; those not finite do not count.
    """
    logs = np.asarray(log_ratios, dtype=np.float64)
    sizes = np.sort(np.abs(logs[np.isfinite(logs)]).clip(max=MAX_LOG_RATIO))
    means = np.cumsum(sizes**2) / np.arange(1, sizes.size + 1)
    # Means of sorted numbers never fall: those kept come first.
    kept = int((means <= most).sum())
    if kept == sizes.size:
        return math.inf
    below = sizes[sizes < sizes[kept]]
    return float(below[-1]) if below.size else 0.0


def proximal_logprobs(
    proximal: Proximal, current: Tensor, start: Tensor, behaviour: Tensor, staleness: Tensor
) -> Tensor:
    """float [n], log pi_prox, without gradient.

    `interpolated`: log pi_prox = a log pi_behav + (1 - a) log pi_theta, a = 1 / staleness and 0 for
    fresh tokens (A-3PO, arXiv:2512.06547): no forward pass of its own.

    Args:
        current, start, behaviour: float [n], log-probabilities now, at the start of the batch, and
            of the policy that generated each token.
        staleness: int64 [n], policy versions between that policy and the trainer's.
    """
    match proximal:
        case Proximal.RECOMPUTED:
            return start.detach()
        case Proximal.BEHAVIOUR:
            return behaviour
        case Proximal.INTERPOLATED:
            share = torch.where(staleness > 0, 1.0 / staleness.clamp(min=1), 0.0)
            share = share.to(current.dtype)
            # A weight of 0 would let a NaN through.
            mixed = share * behaviour + (1.0 - share) * current.detach()
            return torch.where(staleness > 0, mixed, current.detach())
