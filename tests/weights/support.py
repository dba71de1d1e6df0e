"""Weights that change as under RL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import fleet
from benchmarks.fleet import PROMPT, logprobs_of
from leeway.manifests import Canary
from leeway.tensors import Tensor
from trainer_service.weight_broadcast import WeightPublisher

DEADLINE = 30.0


class Trainer:
    """float32 masters and their bfloat16 values; `step` moves them a little."""

    def __init__(self, seed: int = 0, scale: int = 1) -> None:
        self._random = np.random.default_rng(seed)
        shapes = {
            "embed.weight": (64 * scale, 33),
            "norm.weight": (33,),
            "layer.weight": (48, 40 * scale),
            "head.bias": (7,),
        }
        self.masters = {
            name: self._random.normal(0, 0.05, shape).astype(np.float32)
            for name, shape in shapes.items()
        }

    def step(self, size: float = 3e-5) -> None:
        for name, master in self.masters.items():
            if name != "head.bias":
                master += self._random.normal(0, size, master.shape).astype(np.float32)

    def weights(self) -> dict[str, Tensor]:
        return {name: bf16(master) for name, master in self.masters.items()}

    def canary(self) -> Canary:
        return Canary(PROMPT, logprobs_of(self.weights()), tolerance=1e-6)


def bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to the nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[k], right[k]) for k in left)


def publisher(incarnation: int = 1, **weights: Any) -> WeightPublisher:
    """One that sends a small policy in many chunks."""
    return fleet.publisher(incarnation, **{"chunk_bytes": 1024, **weights})


def publish(target: WeightPublisher, version: int, trainer: Trainer) -> None:
    """Publishes and waits until it is announced."""
    target.publish(version, trainer.weights().items(), trainer.canary())
    target.wait_announced(version, DEADLINE)
