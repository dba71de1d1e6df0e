"""The loss lives on the leading rank: scores travel there, their gradients travel back.

Two floats a token each way, next to nothing beside the gradients of the weights. So no rank but the
leading one needs advantages or an algorithm, denominators and diagnostics are those of one process,
and nothing is pickled. All ranks that hold scores call `surrogate` for the same round in the same
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_service.backends.base import Loss
from trainer_service.packed import PackedBatch


@dataclass(frozen=True, slots=True)
class Exchange:
    """Where scores are.

    Attributes:
        data: The ranks with other micro-batches than this one's, itself included.
        scoring: All ranks that hold scores; the first one leads.
        leader: Its rank in the world.
    """

    data: dist.ProcessGroup
    scoring: dist.ProcessGroup
    leader: int

    def surrogate(
        self,
        sizes: Sequence[int],
        batches: Sequence[PackedBatch],
        loss: Loss | None,
        logprobs: Tensor,
        entropy: Tensor,
    ) -> Tensor:
        """A scalar whose gradient in this rank's scores is that of the loss.

        Args:
            sizes: Trained tokens of each data rank's micro-batch of this round.
            batches: Those micro-batches, without idle ones, on the leading rank.
            loss: On the leading rank.
            logprobs: float32 [n], with gradient; n is this rank's size.
            entropy: float32 [n].
        """
        scores = torch.stack([logprobs.detach(), entropy.detach()])
        gathered = self.gather(sizes, scores)
        gradients = scores.new_zeros(len(sizes), 2, max(sizes))
        if dist.get_rank() == self.leader:
            assert loss is not None
            for index, batch in enumerate(batches):
                gradients[index, :, : sizes[index]] = _gradient(
                    batch, loss, gathered[index], entropy.requires_grad
                )
        dist.broadcast(gradients, src=self.leader, group=self.scoring)
        own = gradients[self.data.rank(), :, : logprobs.numel()]
        total = (own[0] * logprobs).sum()
        return total + (own[1] * entropy).sum() if entropy.requires_grad else total

    def gather(self, sizes: Sequence[int], scores: Tensor) -> list[Tensor]:
        """float32 [k, size] of every data rank, given this rank's."""
        padded = scores.new_zeros(scores.shape[0], max(sizes))
        padded[:, : scores.shape[1]] = scores
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.data)
        return [part[:, :size] for part, size in zip(parts, sizes, strict=True)]


def _gradient(batch: PackedBatch, loss: Loss, scores: Tensor, with_entropy: bool) -> Tensor:
    """float32 [2, n]: of the loss in log-probabilities and entropies."""
    with torch.enable_grad():
        logprobs, entropy = scores[0].clone().requires_grad_(), scores[1].clone()
        entropy.requires_grad_(with_entropy)
        loss(batch, logprobs, entropy).backward()  # type: ignore[no-untyped-call]
    return torch.stack(
        [torch.zeros_like(t) if t.grad is None else t.grad for t in (logprobs, entropy)]
    )
