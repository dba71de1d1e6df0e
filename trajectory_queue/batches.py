"""What a trained batch says about the queue: its staleness, and how its answers came about.

Trainers write these into metrics.jsonl, simulated ones too; `leeway plan --from` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from leeway.trajectory import Group, Trajectory

# Answers of a batch that are written down.
_MOST_ANSWERS = 64


def staleness_metrics(trajectories: Sequence[Trajectory], trainer_version: int) -> dict[str, Any]:
    """Over trained tokens, in versions, at the step that used them."""
    ranges = [r for t in trajectories if (r := t.version_range()) is not None]
    tokens = [trainer_version - t.token_versions()[t.loss_mask] for t in trajectories]
    of_tokens = np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int64)
    in_flight = [newest - oldest for oldest, newest in ranges]
    in_queue = [trainer_version - newest for _, newest in ranges]
    trained = [own for own in tokens if own.size]
    flights = [own - own.min() for own in trained]
    # A trainer that resumed may be behind the version of what an earlier life had generated.
    waits = [np.full(own.size, max(0, own.min())) for own in trained]
    return {
        "staleness_mean": float(of_tokens.mean()) if of_tokens.size else 0.0,
        "staleness_max": int(of_tokens.max(initial=0)),
        "staleness_in_flight_mean": float(np.mean(in_flight)) if in_flight else 0.0,
        "staleness_in_queue_mean": float(np.mean(in_queue)) if in_queue else 0.0,
        "staleness_in_flight_tokens": _histogram(flights),
        "staleness_in_queue_tokens": _histogram(waits),
        "versions_in_batch": int(np.unique(of_tokens).size),
    }


def answers_sampled(groups: Sequence[Group]) -> list[list[tuple[int, float]]]:
    """(tokens, seconds) of each answer of some whole groups, evenly spaced over the batch."""
    size = max((len(group.trajectories) for group in groups), default=1)
    count = min(len(groups), max(1, _MOST_ANSWERS // size))
    chosen = np.linspace(0, max(0, len(groups) - 1), count).astype(int).tolist()
    return [
        [(t.response_length, round(t.generation_seconds, 3)) for t in groups[index].trajectories]
        for index in chosen
    ]


def _histogram(parts: list[npt.NDArray[np.int64]]) -> list[int]:
    """How many tokens have 0, 1, 2, ... versions of a part."""
    counts: list[int] = np.bincount(np.concatenate(parts)).tolist() if parts else []
    return counts
