"""A copy of a backend's state between two steps, and its way to the disk while training goes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from trainer_service.backends import files
from trainer_service.backends.optimizer import MasterAdamW
from trainer_service.backends.world import World

WRITE_SECONDS = 3600.0
"""How long a rank may take to write its part of a checkpoint."""
_numbers = itertools.count()
"""Of this process's snapshots; all ranks count alike."""


def snapshot(
    optimizer: MasterAdamW,
    wholes: Callable[[Mapping[str, Tensor]], Iterable[tuple[str, Tensor]]],
    *,
    world: World | None,
    own: int,
    ranks: int,
) -> Callable[[Path], None]:
    """Copies masters, moments and counts; what it returns writes them, see `Backend.snapshot`.

    Args:
        wholes: Makes (Hugging Face name, whole tensor) of the optimizer's, on `ranks` ranks alike;
            each keeps its share.
        world: All ranks; None when this process has everything.
        own: This rank's index among `ranks`.
    """
    turns = itertools.count()

    def copied(parts: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
        return {
            prefix + name: values.to("cpu", copy=True)
            for name, values in wholes(parts)
            if next(turns) % ranks == own
        }

    masters = copied(optimizer.masters())
    state: dict[str, Tensor] = {}
    for moment, of in optimizer.moments():
        state |= copied(of, f"{moment}.")
    if world is None or world.leads:
        state |= {name: count.clone().cpu() for name, count in optimizer.counts().items()}
    if world is None:
        return lambda directory: files.write(directory, files.WHOLE, masters, state)
    key = f"snapshot/{next(_numbers)}"
    return lambda directory: _write_part(directory, key, world, masters, state)


def _write_part(
    directory: Path,
    key: str,
    world: World,
    masters: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
) -> None:
    """The leader knows the directory, the others learn it from it; it returns when all have
    written.

    Raises:
        DeadlineError: Some rank did not, within WRITE_SECONDS.
    """
    where = f"{key}/directory"
    if world.leads:
        world.note(where, str(directory))
    else:
        (told,) = world.read([where], "the checkpoint's directory", WRITE_SECONDS)
        directory = Path(told)
    files.write(directory, f"-{world.rank:05d}", masters, state)
    world.note(f"{key}/{world.rank}")
    if world.leads:
        everyone = [f"{key}/{rank}" for rank in range(world.size)]
        world.read(everyone, f"all {world.size} ranks' parts of the checkpoint", WRITE_SECONDS)
