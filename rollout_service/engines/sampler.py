"""Drawing tokens, and their behaviour log-probabilities.

A draw inverts the cumulative distribution at a uniform number that depends on nothing but the
request's seed and the token's position in its sequence. So a sequence's tokens do not depend on
what else is in the batch, on where it was interrupted, or on which node continues it.

The support that top-k and top-p leave is all tokens whose logit reaches a threshold: top-k first,
then the smallest set of most likely tokens whose mass reaches top_p. Ties at the threshold stay in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leeway.trajectory import Float32Array, Sampling

# Rows handled at once: 8 x 49,152 float32 stay in a core's second-level cache between passes.
ROWS = 8
# The distribution is inverted in two levels: over sums of so many tokens, then inside one sum.
BLOCK = 256
# Top-p looks at so many most likely tokens before it sorts the whole vocabulary.
CANDIDATES = 1024

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> torch.Tensor:
    """float64 [n] in [0, 1): SplitMix64 (Steele et al., 2014) of each seed, at each position."""
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)
    return torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(
    logits: Tensor, samplings: Sequence[Sampling], uniform: Tensor
) -> tuple[npt.NDArray[np.int64], Float32Array]:
    """Draws one token a row.

    Args:
        logits: float32 [n, vocabulary]; used up as scratch.
        samplings: n of them. A temperature of 0 takes the most likely token.
        uniform: float64 [n] in [0, 1).

    Returns:
        Tokens, int64 [n], and their log-probabilities, float32 [n], under the distribution that was
        sampled from: after temperature, over the support (greedy: at temperature 1, no support).
    """
    tokens, logprobs = [], []
    for start in range(0, len(samplings), ROWS):
        rows = slice(start, start + ROWS)
        drawn, logprob = _draw_rows(logits[rows], samplings[rows], uniform[rows])
        tokens.append(drawn)
        logprobs.append(logprob)
    return torch.cat(tokens).numpy(), torch.cat(logprobs).numpy()


def _draw_rows(
    logits: Tensor, samplings: Sequence[Sampling], uniform: Tensor
) -> tuple[Tensor, Tensor]:
    if any(s.temperature not in (0.0, 1.0) for s in samplings):
        logits /= torch.tensor([[s.temperature or 1.0] for s in samplings])
    for row, sampling in enumerate(samplings):
        if sampling.temperature > 0.0 and (sampling.top_k > 0 or sampling.top_p < 1.0):
            _restrict(logits[row], sampling)
    logits -= logits.amax(-1, keepdim=True)
    mass = logits.exp()
    tokens, total = _invert(mass, uniform)
    for row, sampling in enumerate(samplings):
        if sampling.temperature == 0.0:
            tokens[row] = logits[row].argmax()
    logprobs = logits.gather(1, tokens[:, None])[:, 0].double() - total.log()
    return tokens, logprobs.float()


def _invert(mass: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The token at which each row's cumulative mass passes `uniform` of its total; the totals."""
    vocabulary = mass.shape[1]
    whole = vocabulary - vocabulary % BLOCK
    sums = mass[:, :whole].view(len(mass), -1, BLOCK).sum(-1)
    if whole < vocabulary:
        sums = torch.cat([sums, mass[:, whole:].sum(-1, keepdim=True)], dim=1)
    cumulative = sums.double().cumsum(1)
    total = cumulative[:, -1]
    target = _below(uniform * total, total)[:, None]
    block = (cumulative <= target).sum(1, keepdim=True)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0.0)

    window = block * BLOCK + torch.arange(BLOCK)
    inside = mass.gather(1, window.clamp(max=vocabulary - 1)).double()
    inner = torch.where(window < vocabulary, inside, 0.0).cumsum(1)
    rest = _below((target - before)[:, 0], inner[:, -1])[:, None]
    return block[:, 0] * BLOCK + (inner <= rest).sum(1), total


def _below(values: Tensor, limit: Tensor) -> Tensor:
    """`values`, held strictly under `limit`, so that rounding never steps past the last token."""
    return torch.minimum(values, torch.nextafter(limit, torch.zeros_like(limit)))


def _restrict(logits: Tensor, sampling: Sampling) -> None:
    """Sets the logits [vocabulary] outside the support to -inf."""
    if 0 < sampling.top_k < logits.numel():
        lowest = logits.topk(sampling.top_k).values[-1]
        logits.masked_fill_(logits < lowest, -torch.inf)
    if sampling.top_p < 1.0:
        normaliser = logits.logsumexp(0)
        best = logits.topk(min(CANDIDATES, logits.numel())).values
        reached = (best - normaliser).exp().cumsum(0)
        if float(reached[-1]) < sampling.top_p:
            best = logits.sort(descending=True).values
            reached = (best - normaliser).exp().cumsum(0)
        needed = min(int((reached < sampling.top_p).sum()), best.numel() - 1)
        logits.masked_fill_(logits < best[needed], -torch.inf)
