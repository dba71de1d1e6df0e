"""AdamW on float32 master weights, in one pass over memory.

The model computes with working weights: the masters rounded to bf16, kept in the arithmetic's
dtype. Gradients arrive on the working weights and apply to the masters. What must hold: after every
step, and after loading, working = round(masters); a gradient that is not finite leaves everything
untouched.

Masters that begin as bf16 values stand in the middle of their rounding cell: at RL's learning rates
none but the smallest would reach its border for many steps, and the policy would stand still. So
each begins at a random place in its cell (`dither`). The policy is the same to the bit, and from
the first step on it moves as far as its masters do, on average.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from leeway.config import TrainerConfig
from leeway.errors import ConfigError
from trainer_service.backends.base import DivergedError, StepResult

CHUNK_ELEMENTS = 1 << 20
"""Elements updated at once: a chunk is rounded while it is still in the cache."""
DITHER_SEED = 0
"""The same for every run: ranks and lives of a trainer must begin with the same masters."""


class MasterAdamW:
    """Masters, moments and step count of named working weights."""

    def __init__(
        self, working: Mapping[str, Tensor], config: TrainerConfig, *, round_to_bf16: bool
    ) -> None:
        """Copies the working weights as masters, and rounds the working weights in place."""
        self._config = config
        self._round = round_to_bf16
        self._working = dict(working)
        self._masters = {
            name: tensor.detach().to(torch.float32, copy=True) for name, tensor in working.items()
        }
        if round_to_bf16:
            generator = torch.Generator().manual_seed(DITHER_SEED)
            for master in self._masters.values():
                dither(master, generator)
        self._first = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        self._second = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        self._steps = 0
        device = next(iter(self._masters.values())).device
        self._updates = torch.zeros((), dtype=torch.float32, device=device)
        self._refresh()

    @property
    def lr(self) -> float:
        """Of the next step: linear warm-up, then constant."""
        return self._config.lr * min(1.0, (self._steps + 1) / max(1, self._config.warmup_steps))

    def step(self) -> StepResult:
        """Applies and drops the working weights' gradients.

        Raises:
            DivergedError: A gradient is NaN or infinite.
        """
        gradients = {
            name: _dense(tensor.grad).view(-1)
            for name, tensor in self._working.items()
            if tensor.grad is not None
        }
        lr = self.lr
        if not gradients:
            self._steps += 1
            return StepResult(grad_norm=0.0, lr=lr)
        norms = torch.stack(
            [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients.values()]
        )
        norm = float(torch.linalg.vector_norm(norms))
        for tensor in self._working.values():
            tensor.grad = None
        if not torch.isfinite(norms).all():
            bad = [n for n, value in zip(gradients, norms, strict=True) if not value.isfinite()]
            raise DivergedError(
                f"the gradient of {', '.join(bad[:3])} is not finite ({len(bad)} of "
                f"{len(gradients)} tensors); look at the batch's log-probabilities and advantages"
            )
        scale = min(1.0, self._config.max_grad_norm / (norm + 1e-6))
        with torch.no_grad():
            for name, gradient in gradients.items():
                self._update(name, gradient, scale, lr)
        self._updates += 1
        self._steps += 1
        return StepResult(grad_norm=norm, lr=lr)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Moments and counts by name, for `restore`."""
        for name in self._masters:
            yield f"first.{name}", self._first[name]
            yield f"second.{name}", self._second[name]
        yield "steps", torch.tensor(self._steps)
        yield "updates", self._updates

    def masters(self) -> Mapping[str, Tensor]:
        """float32 by Hugging Face name."""
        return self._masters

    def restore(self, masters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Takes over what `masters` and `state` gave.

        Raises:
            ConfigError: Names or shapes are of another model.
        """
        expected = dict(self.state())
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

    def _update(self, name: str, gradient: Tensor, scale: float, lr: float) -> None:
        # Norms and biases, the one-dimensional tensors, are not decayed.
        decay = self._config.weight_decay if self._masters[name].ndim > 1 else 0.0
        beta1, beta2 = self._config.betas
        arrays = (self._masters[name], gradient, self._first[name], self._second[name])
        working = self._working[name].detach()
        for master, grad, first, second, work in zip(
            *(torch.split(array.view(-1), CHUNK_ELEMENTS) for array in (*arrays, working)),
            strict=True,
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


def dither(master: Tensor, generator: torch.Generator) -> None:
    """Moves each bf16 value to a random place among the numbers that round to it, in place.

    A float32's bits, read as an integer, count the numbers of its sign by magnitude; the upper half
    is its bf16 value, and all integers less than 2^15 away round to it. Zeros stay zeros, and a
    tensor that holds other than bf16 values stays as it is: its masters are spread already.

    Args:
        master: float32, contiguous.
    """
    chunks = torch.split(master.view(torch.int32).view(-1), CHUNK_ELEMENTS)
    if any((chunk & 0xFFFF).any() for chunk in chunks):
        return
    for chunk in chunks:
        offset = torch.randint(-0x7FFF, 0x8000, chunk.shape, generator=generator, dtype=torch.int32)
        chunk += torch.where((chunk & 0x7FFFFFFF) == 0, 0, offset.to(chunk.device))


def _dense(gradient: Tensor) -> Tensor:
    """An embedding's gradient comes as a few rows."""
    return gradient.to_dense() if gradient.is_sparse else gradient.contiguous()
