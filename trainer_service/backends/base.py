"""The backend's contract: everything the trainer's loop needs from a model and its optimizer.

A backend knows packed batches and a loss to be minimised; it does not know where the loss comes
from. Its calls are made from one thread, one at a time, unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from leeway.errors import LeewayError
from trainer_service.balance import ONE_RANK, Spread
from trainer_service.packed import PackedBatch

if TYPE_CHECKING:
    from torch import Tensor


class DivergedError(LeewayError):
    """A gradient is NaN or infinite. The weights are as they were before the step."""


class Loss(Protocol):
    """A loss over one micro-batch's trained tokens."""

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor, /) -> Tensor:
        """A scalar, differentiable in its arguments; micro-batches' losses add up to the step's.

        Args:
            logprobs: float32 [n], of the trained tokens at their sampling temperature, with
                gradient. A critic's values.
            entropy: float32 [n], of the distributions they were drawn from, in nats, with gradient.
                A critic's is 0.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        grad_norm: Global 2-norm of the gradient before clipping; 0 when there were no
            micro-batches.
        lr: The learning rate that was used.
    """

    grad_norm: float
    lr: float


class Backend(Protocol):
    """A model with its optimizer: a policy, or a critic, of which `weights` are not asked for.

    A model that lies on several ranks has one backend on each, and all call the same methods in the
    same order. What they are given and return counts on the leading rank: it talks to the queue,
    and `distributed.Leader` makes the others follow.
    """

    @property
    def spread(self) -> Spread:
        """Over what micro-batches are spread: how a step should be packed."""
        return ONE_RANK

    @property
    def context_length(self) -> int:
        """Longest prompt and answer in tokens that the model's positions allow."""
        ...

    def scores(
        self, batches: Sequence[PackedBatch], *, reference: bool = False
    ) -> list[npt.NDArray[np.float32]]:
        """For each float32 [n]: log-probabilities of the trained tokens under the current weights,
        or under those of the frozen reference that the backend was given. A critic's scores are
        values, of the state before each token."""
        ...

    def accumulate(self, batches: Sequence[PackedBatch], loss: Loss) -> None:
        """The gradient of the sum of the micro-batches' losses. Weights and optimizer stay as they
        are: `snapshot` may be called meanwhile, from another thread."""
        ...

    def apply(self) -> StepResult:
        """One optimizer step on what was accumulated, clipped by its global norm.

        Without micro-batches the weights and the optimizer stay as they are, but the step counts.

        Raises:
            DivergedError: The gradient is not finite.
        """
        ...

    def step(self, batches: Sequence[PackedBatch], loss: Loss) -> StepResult:
        """`accumulate`, then `apply`."""
        self.accumulate(batches, loss)
        return self.apply()

    def weights(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """(Hugging Face name, values) of every tensor, tied ones once, always in the same order.

        Values are what the forward pass uses: bf16 as uint16 [shape], or float32 [shape]. They may
        share memory with the weights: read them before the next step.
        """
        ...

    def snapshot(self) -> Callable[[Path], None]:
        """Copies master weights, optimizer state and step count.

        What it returns writes the copy into an existing directory (see `files`). Call it once, from
        any thread, at any time: it waits for all ranks to have written.
        """
        ...

    def save(self, directory: Path) -> None:
        """`snapshot`, written at once."""
        self.snapshot()(directory)

    def load(self, directory: Path) -> None:
        """Restores, bitwise, what `snapshot` wrote, on whichever ranks and with whichever backend.

        Raises:
            ConfigError: The files are of another model.
        """
        ...
