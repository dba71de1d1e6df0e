"""What a step is computed from: micro-batches of packed tokens, and the step's plan of them.

`batching` makes them; backends compute their inputs, losses look at the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

ROOT = -1
"""Parent of a segment that continues no other."""


class Segment(NamedTuple):
    """Consecutive tokens of a micro-batch, and the index of the segment that they continue."""

    start: int
    length: int
    parent: int = ROOT


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What a rank needs to compute a micro-batch of T packed tokens, of which n are trained.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T]; a segment's go on from its parent's.
        segments: They cover the T tokens in order; a parent comes before its children.
        rows: int64 [r], where in the T tokens the hidden states lie that predict trained tokens,
            each once.
        temperatures: float32 [r], at which the tokens after each were sampled.
        predictions: int64 [n], which of the r predicts each trained token.
        targets: int64 [n], the trained tokens.
    """

    token_ids: Int64Array
    positions: Int64Array
    segments: tuple[Segment, ...]
    rows: Int64Array
    temperatures: Float32Array
    predictions: Int64Array
    targets: Int64Array

    @staticmethod
    def idle() -> Inputs:
        """A micro-batch that trains nothing: for a rank that must take part but has none left."""
        none = np.empty(0, dtype=np.int64)
        return Inputs(
            token_ids=np.zeros(1, dtype=np.int64),
            positions=np.zeros(1, dtype=np.int64),
            segments=(Segment(0, 1),),
            rows=none,
            temperatures=none.astype(np.float32),
            predictions=none,
            targets=none,
        )

    def filled(self, multiple: int) -> Self:
        """With tokens appended that nothing sees, up to a multiple."""
        size = self.token_ids.size
        missing = -size % multiple
        if not missing:
            return self
        blank = np.zeros(missing, dtype=np.int64)
        return replace(
            self,
            token_ids=np.concatenate([self.token_ids, blank]),
            positions=np.concatenate([self.positions, blank]),
            segments=(*self.segments, Segment(size, missing)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch(Inputs):
    """One micro-batch: its inputs, and what a loss looks at.

    Attributes:
        behaviour: float32 [n], log-probabilities under the policy that generated them.
        advantages: float32 [n].
        weights: float32 [n], of each token's loss in the aggregated loss of the whole step.
        versions: int64 [n], the policy version that generated each.
        sequences: int64 [n], the trajectory's index in the step.
        proximal: float32 [n], log-probabilities at the start of the batch. None when the batch is
            one optimizer step: the forward pass of that very step then yields them.
        reference: float32 [n], log-probabilities under the reference, when the loss has one.
        values: float32 [n], the critic's at the start of the batch, when there is one: of the state
            before each token.
        returns: float32 [n], what they should have been; NaN where no step begins.
    """

    behaviour: Float32Array
    advantages: Float32Array
    weights: Float32Array
    versions: Int64Array
    sequences: Int64Array
    proximal: Float32Array | None = None
    reference: Float32Array | None = None
    values: Float32Array | None = None
    returns: Float32Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The micro-batches of one optimizer step, and what went into them.

    Attributes:
        microbatches: Empty when no trajectory can move the weights.
        trajectories: All that have a trained token.
        trained_tokens: All trained tokens, those of unpacked trajectories included.
        packed_trajectories: Those that are computed.
        packed_tokens: Tokens in all forward passes.
        sequence_tokens: Prompt and response tokens of all trajectories, each counted by itself.
    """

    microbatches: tuple[PackedBatch, ...]
    trajectories: int
    trained_tokens: int
    packed_trajectories: int
    packed_tokens: int
    sequence_tokens: int
