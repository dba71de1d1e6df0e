"""What a simulation measures, over the steps after its warm-up."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step. Times are seconds since the simulation began."""

    ended: float
    waited_seconds: float
    at_budget: bool
    """Whether as many groups were outstanding as may be, while the trainer waited."""
    learned_seconds: float
    tokens: float
    """Trained."""
    masked_tokens: float
    generated_tokens: float
    """Of the batch, masked ones included."""
    staleness: npt.NDArray[np.float64]
    """Trained tokens by their staleness, [versions]."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over the measured steps.

    Attributes:
        tokens_per_second: Trained tokens.
        trainer_busy: Share of the time in which the trainer learned or published.
        rollout_busy: Share of the nodes' time in which they decoded.
        slots_busy: Decoding sequences, of the most that the nodes may have.
        staleness_mean, staleness_max, staleness_tokens: Of trained tokens, in versions; the last is
            each staleness' share.
        masked_share, dropped_share: Of generated tokens, those that the budget took out of the
            loss, and those of groups that it ended or issued again.
    """

    steps: int
    seconds: float
    steps_per_hour: float
    tokens_per_second: float
    trainer_busy: float
    rollout_busy: float
    slots_busy: float
    staleness_mean: float
    staleness_max: int
    staleness_tokens: tuple[float, ...]
    masked_share: float
    dropped_share: float

    def row(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    steps: list[Step],
    *,
    warmup: int,
    busy_seconds: float,
    slot_seconds: float,
    span: float,
    nodes: int,
    slots: int,
    dropped_tokens: float,
) -> Outcome:
    """Args:
    warmup: The first steps, which are left out: the queue fills.
    busy_seconds, slot_seconds, dropped_tokens: Of all nodes, over the whole span.
    """
    kept = steps[warmup:]
    began = steps[warmup - 1].ended if warmup else 0.0
    seconds = kept[-1].ended - began
    longest = max(step.staleness.size for step in kept)
    histogram = np.zeros(longest)
    for step in kept:
        histogram[: step.staleness.size] += step.staleness
    tokens = histogram.sum()
    generated = sum(step.generated_tokens for step in steps) + dropped_tokens
    busy = sum(step.learned_seconds for step in kept)
    used = np.flatnonzero(histogram)
    return Outcome(
        steps=len(kept),
        seconds=seconds,
        steps_per_hour=3600.0 * len(kept) / seconds,
        tokens_per_second=sum(step.tokens for step in kept) / seconds,
        trainer_busy=busy / seconds,
        rollout_busy=busy_seconds / (span * nodes),
        slots_busy=slot_seconds / (span * nodes * slots),
        staleness_mean=float(histogram @ np.arange(longest) / tokens) if tokens else 0.0,
        staleness_max=int(used[-1]) if used.size else 0,
        staleness_tokens=tuple(float(value) for value in histogram / max(tokens, 1e-9)),
        masked_share=sum(step.masked_tokens for step in kept)
        / max(sum(step.generated_tokens for step in kept), 1e-9),
        dropped_share=dropped_tokens / max(generated, 1e-9),
    )
