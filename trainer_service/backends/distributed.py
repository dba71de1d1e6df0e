"""One rank leads, the others follow: it makes every rank call the same method of its backend.

A command is a number, which of the models it is for and, for work on micro-batches, their inputs;
it travels over the control group. What must hold: the leader's commands are one at a time,
whichever thread gives them, so that collectives never cross.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from enum import IntEnum, auto
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from trainer_service.backends.base import Backend, DivergedError, Loss, StepResult
from trainer_service.backends.inputs import decode, encode
from trainer_service.backends.world import World
from trainer_service.balance import Spread
from trainer_service.packed import Inputs, PackedBatch


class Command(IntEnum):
    SCORES = auto()
    REFERENCE = auto()
    ACCUMULATE = auto()
    APPLY = auto()
    WEIGHTS = auto()
    SNAPSHOT = auto()
    LOAD = auto()
    END = auto()


class RankBackend(Backend, Protocol):
    """A backend on one of several ranks. A follower has inputs only, and no loss."""

    def scores(
        self, batches: Sequence[Inputs], *, reference: bool = False
    ) -> list[npt.NDArray[np.float32]]: ...

    def accumulate(self, batches: Sequence[Inputs], loss: Loss | None) -> None: ...


class Leader(Backend):
    """Implements `Backend` over all ranks. Safe to call from several threads."""

    def __init__(self, own: RankBackend, world: World, model: int, lock: threading.Lock) -> None:
        self._own = own
        self._world = world
        self._model = model
        self._lock = lock

    @classmethod
    def of(cls, models: Sequence[RankBackend], world: World) -> list[Leader]:
        """One for each; `follow` has the same models in the same order."""
        lock = threading.Lock()
        return [cls(own, world, number, lock) for number, own in enumerate(models)]

    @property
    def context_length(self) -> int:
        return self._own.context_length

    @property
    def spread(self) -> Spread:
        return self._own.spread

    def scores(
        self, batches: Sequence[PackedBatch], *, reference: bool = False
    ) -> list[npt.NDArray[np.float32]]:
        with self._lock:
            command = Command.REFERENCE if reference else Command.SCORES
            self._send(command, encode(batches))
            return self._own.scores(batches, reference=reference)

    def accumulate(self, batches: Sequence[PackedBatch], loss: Loss) -> None:
        with self._lock:
            self._send(Command.ACCUMULATE, encode(batches))
            self._own.accumulate(batches, loss)

    def apply(self) -> StepResult:
        with self._lock:
            self._send(Command.APPLY)
            return self._own.apply()

    def weights(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        with self._lock:
            self._send(Command.WEIGHTS)
            stream = self._own.weights()
            try:
                yield from stream
            finally:
                # The others gather all of them.
                for _ in stream:
                    pass

    def snapshot(self) -> Callable[[Path], None]:
        with self._lock:
            self._send(Command.SNAPSHOT)
            return self._own.snapshot()

    def load(self, directory: Path) -> None:
        with self._lock:
            self._send(Command.LOAD, str(directory).encode())
            self._own.load(directory)

    def end(self) -> None:
        """Lets the followers of all models go."""
        with self._lock:
            self._send(Command.END)

    def _send(self, command: Command, message: bytes = b"") -> None:
        _broadcast(self._world, torch.tensor([command, self._model, len(message)]))
        if message:
            _broadcast(self._world, torch.frombuffer(bytearray(message), dtype=torch.uint8))


def follow(models: Sequence[RankBackend], world: World) -> None:
    """Does what the leader does, until it says END."""
    with ThreadPoolExecutor(1, "checkpoint") as writer:
        writing: dict[int, Future[None]] = {}
        while True:
            head = torch.zeros(3, dtype=torch.int64)
            _broadcast(world, head)
            command, model, size = head.tolist()
            body = torch.empty(size, dtype=torch.uint8)
            if size:
                _broadcast(world, body)
            message = body.numpy().tobytes()
            own = models[model]
            match Command(command):
                case Command.SCORES:
                    own.scores(decode(message))
                case Command.REFERENCE:
                    own.scores(decode(message), reference=True)
                case Command.ACCUMULATE:
                    own.accumulate(decode(message), None)
                case Command.APPLY:
                    # The leader raises it as well, and decides.
                    with suppress(DivergedError):
                        own.apply()
                case Command.WEIGHTS:
                    for _ in own.weights():
                        pass
                case Command.SNAPSHOT:
                    # Only its own last one: all models are copied before the first is written.
                    if model in writing:
                        writing[model].result()
                    writing[model] = writer.submit(own.snapshot(), Path())
                case Command.LOAD:
                    own.load(Path(message.decode()))
                case Command.END:
                    for last in writing.values():
                        last.result()
                    return


class Round(NamedTuple):
    """Micro-batches that are computed at a time, one on each data rank.

    Attributes:
        own: This rank's; idle when there are none left for it.
        sizes: Trained tokens of each rank's.
        all: Those of all ranks, without idle ones.
    """

    own: Inputs
    sizes: list[int]
    all: list[Any]


def rounds(batches: Sequence[Inputs], ranks: int, rank: int) -> Iterator[Round]:
    """All rounds of a step, as this rank sees them."""
    for start in range(0, len(batches), ranks):
        at_a_time = list(batches[start : start + ranks])
        sizes = [batch.targets.size for batch in at_a_time]
        sizes += [0] * (ranks - len(sizes))
        own = at_a_time[rank] if rank < len(at_a_time) else Inputs.idle()
        yield Round(own, sizes, at_a_time)


def _broadcast(world: World, tensor: torch.Tensor) -> None:
    dist.broadcast(tensor, src=world.leader, group=world.control)
