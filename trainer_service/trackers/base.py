"""The tracker's contract. A tracker is opened, used and closed by one thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told of a run.

    Attributes:
        directory: The run's own; what a tracker keeps on disk goes below it.
        settings: The resolved configuration by dotted names, secrets left out.
    """

    name: str
    directory: Path
    settings: Mapping[str, str]


class Tracker(Protocol):
    """Takes a run's metrics. May raise anything at any time: whoever feeds it goes on."""

    def __init__(self, run: TrackedRun, first_step: int) -> None:
        """Opens the run, again if it was there. `first_step`: of the first row that comes; a
        resumed run does some steps again."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        """Everything logged is where it belongs once this returns."""
        ...
