"""Arithmetic that every loss shares: ratios that cannot overflow, and sums over sequences.

Tokens are flat, [n]; `valid` marks those that count. What must hold: a token that is not valid is
selected away before any arithmetic, never multiplied by 0, so that its value (NaN included) changes
neither value nor gradient; no log-ratio, however extreme, gives NaN or infinity.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp; beyond, their gradient is 0. exp(20) = 5e8 is past any
clip or cap, and far from overflow."""


def select(valid: Tensor, values: Tensor) -> Tensor:
    """The valid values, 0 elsewhere."""
    return torch.where(valid, values, torch.zeros_like(values))


def log_ratio(numerator: Tensor, denominator: Tensor, valid: Tensor) -> Tensor:
    """numerator - denominator within +-20, and 0 where not valid."""
    return bounded(select(valid, numerator - denominator))


def bounded(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


class Sequences:
    """Which tokens make up a trajectory. All tokens of one must be at hand."""

    def __init__(self, ids: Tensor, valid: Tensor) -> None:
        """
        Args:
            ids: int64 [n], equal for tokens of one trajectory.
            valid: bool [n].
        """
        self._valid = valid
        numbers, self._index = torch.unique(ids, return_inverse=True)
        self.count = numbers.numel()
        self.lengths = self._reduce(valid.to(torch.float32))
        """float32 [sequences], valid tokens of each."""

    def sum(self, values: Tensor) -> Tensor:
        """[sequences], over valid tokens."""
        return self._reduce(select(self._valid, values))

    def mean(self, values: Tensor) -> Tensor:
        """[sequences], over valid tokens; 0 without any."""
        return self.sum(values) / self.lengths.clamp(min=1.0)

    def max(self, values: Tensor) -> Tensor:
        """[sequences], over valid tokens; -inf without any."""
        lowest = torch.full_like(values, -torch.inf)
        return lowest[: self.count].scatter_reduce(
            0, self._index, torch.where(self._valid, values, lowest), "amax"
        )

    def spread(self, of_sequences: Tensor) -> Tensor:
        """[n], each token gets its sequence's value."""
        return of_sequences[self._index]

    def _reduce(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.count).index_add(0, self._index, values)
