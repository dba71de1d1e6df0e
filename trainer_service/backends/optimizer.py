"""AdamW on float32 master weights, in one pass over memory.

The model computes with working weights: the masters rounded to bf16, kept in the arithmetic's
dtype. A rank may hold only pieces of them: everything here is element by element but the gradient's
norm, which is summed over the ranks. What must hold: after every step, and after loading,
working = round(masters); a gradient that is not finite leaves everything untouched, on all ranks.

Masters that begin as bf16 values stand in the middle of their rounding cell: at RL's learning rates
none but the smallest would reach its border for many steps, and the policy would stand still. So
each begins at a random place in its cell (`dithered`). The policy is the same to the bit, and from
the first step on it moves as far as its masters do, on average.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor
from torch.optim.adamw import adamw

from leeway.config import TrainerConfig
from leeway.errors import ConfigError
from trainer_service.backends.base import DivergedError, StepResult

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CHUNK_ELEMENTS = 1 << 20
"""Elements updated at once: a chunk is rounded while it is still in the cache."""


class MasterAdamW:
    """Masters, moments and step count of named working weights."""

    def __init__(
        self,
        working: Mapping[str, Tensor],
        masters: Mapping[str, Tensor],
        config: TrainerConfig,
        *,
        round_to_bf16: bool,
        decayed: Collection[str],
        group: ProcessGroup | None = None,
        copies: Collection[str] = (),
    ) -> None:
        """Takes the masters over, and sets the working weights.

        Args:
            working: Contiguous; any float dtype.
            masters: float32, of the same names and shapes.
            decayed: Names under weight decay: matrices, not norms and biases.
            group: The ranks over which the model is cut; None when it is whole.
            copies: Names that another rank holds too, and counts in the gradient's norm.
        """
        self._config = config
        self._round = round_to_bf16
        self._working = dict(working)
        self._masters = dict(masters)
        self._decayed = frozenset(decayed)
        self._group = group
        self._copies = frozenset(copies)
        self._first = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        self._second = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        self._steps = 0
        self._updates = torch.zeros((), dtype=torch.float32, device=self._device)
        self._refresh()

    @property
    def lr(self) -> float:
        """Of the next step: linear warm-up, then constant."""
        return self._config.lr * min(1.0, (self._steps + 1) / max(1, self._config.warmup_steps))

    def step(self, gradients: Mapping[str, Tensor]) -> StepResult:
        """One update; without gradients, on all ranks alike, only the step is counted.

        Args:
            gradients: By name; of the working weights' shapes, in any float dtype.

        Raises:
            DivergedError: A gradient is NaN or infinite, on whichever rank.
        """
        lr = self.lr
        if not gradients:
            self._steps += 1
            return StepResult(grad_norm=0.0, lr=lr)
        norm = self._norm(gradients)
        scale = min(1.0, self._config.max_grad_norm / (norm + 1e-6))
        with torch.no_grad():
            for name, gradient in gradients.items():
                self._update(name, gradient, scale, lr)
        self._updates += 1
        self._steps += 1
        return StepResult(grad_norm=norm, lr=lr)

    def counts(self) -> dict[str, Tensor]:
        """Steps and updates so far."""
        return {"steps": torch.tensor(self._steps), "updates": self._updates}

    def moments(self) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        """("first" | "second", float32 by name)."""
        yield "first", self._first
        yield "second", self._second

    def masters(self) -> Mapping[str, Tensor]:
        """float32 by name."""
        return self._masters

    def restore(self, masters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Takes over what `masters`, `moments` ("first.name") and `counts` gave.

        Raises:
            ConfigError: Names or shapes are of another model.
        """
        expected = {
            f"{moment}.{name}": t for moment, of in self.moments() for name, t in of.items()
        }
        expected |= self.counts()
        for what, own, given in (("weight", self._masters, masters), ("state", expected, state)):
            for name in own.keys() ^ given.keys():
                raise ConfigError(f"checkpoint: {what} {name!r} is on one side only")
            for name, tensor in own.items():
                if tensor.shape != given[name].shape:
                    raise ConfigError(
                        f"checkpoint: {what} {name!r} is {list(given[name].shape)}, the model's is "
                        f"{list(tensor.shape)}"
                    )
        for name, tensor in self._masters.items():
            tensor.copy_(masters[name])
            self._first[name].copy_(state[f"first.{name}"])
            self._second[name].copy_(state[f"second.{name}"])
        self._steps = int(state["steps"])
        self._updates.copy_(state["updates"])
        self._refresh()

    @property
    def _device(self) -> torch.device:
        return next(iter(self._masters.values())).device

    def _norm(self, gradients: Mapping[str, Tensor]) -> float:
        """The 2-norm of the whole gradient."""
        norms = torch.stack(
            [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients.values()]
        )
        counted = torch.tensor([name not in self._copies for name in gradients])
        squares = norms.double().square().where(counted.to(norms.device), 0.0).sum()
        if self._group is not None:
            torch.distributed.all_reduce(squares, group=self._group)
        norm = float(squares.sqrt())
        if norm != norm or norm == float("inf"):
            finite = norms.isfinite().tolist()
            bad = [name for name, good in zip(gradients, finite, strict=True) if not good]
            raise DivergedError(
                f"the gradient of {', '.join(bad[:3]) or 'another rank'} is not finite ({len(bad)} "
                f"of {len(gradients)} tensors); look at the batch's log-probabilities and "
                "advantages"
            )
        return norm

    def _update(self, name: str, gradient: Tensor, scale: float, lr: float) -> None:
        decay = self._config.weight_decay if name in self._decayed else 0.0
        beta1, beta2 = self._config.betas
        arrays = (
            self._masters[name].view(-1),
            gradient.reshape(-1),
            self._first[name].view(-1),
            self._second[name].view(-1),
            self._working[name].detach().view(-1),
        )
        size = CHUNK_ELEMENTS if gradient.device.type == "cpu" else max(1, gradient.numel())
        for master, grad, first, second, work in zip(
            *(torch.split(array, size) for array in arrays), strict=True
        ):
            adamw(
                [master], [grad.to(torch.float32)], [first], [second], [], [self._updates.clone()],
                fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay,
                eps=self._config.eps, maximize=False,
                grad_scale=None if scale == 1.0 else torch.tensor(1.0 / scale, device=grad.device),
            )  # fmt: skip
            self._copy(work, master)

    def _copy(self, working: Tensor, master: Tensor) -> None:
        working.copy_(master.to(torch.bfloat16) if self._round else master)

    @torch.no_grad()
    def _refresh(self) -> None:
        for name, tensor in self._working.items():
            self._copy(tensor, self._masters[name])


def dithered(name: str, weights: Tensor) -> Tensor:
    """Moves each bf16 value to a random place among the numbers that round to it.

    A float32's bits, read as an integer, count the numbers of its sign by magnitude; the upper half
    is its bf16 value, and all integers less than 2^15 away round to it. Zeros stay zeros, and a
    tensor that holds other than bf16 values stays as it is: its masters are spread already. The
    places depend on the name alone, so that all ranks, layouts and lives of a trainer begin with
    the same masters.

    Args:
        weights: The whole tensor, float32.
    """
    master = weights.detach().contiguous().clone()
    chunks = torch.split(master.view(torch.int32).view(-1), CHUNK_ELEMENTS)
    if any((chunk & 0xFFFF).any() for chunk in chunks):
        return master
    generator = torch.Generator().manual_seed(xxhash.xxh32_intdigest(name.encode()))
    for chunk in chunks:
        offset = torch.randint(-0x7FFF, 0x8000, chunk.shape, generator=generator, dtype=torch.int32)
        chunk += torch.where((chunk & 0x7FFFFFFF) == 0, 0, offset.to(chunk.device))
    return master
