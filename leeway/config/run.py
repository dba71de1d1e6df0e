"""Which run, and from which model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from leeway.section import Section


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = "run"
    """Names the run's directory and its keys in Redis."""
    seed: NonNegativeInt = 0
    directory: Path = Path("runs")
    """Holds one directory a run."""

    @property
    def path(self) -> Path:
        return self.directory / self.name


class ModelConfig(Section):
    path: str
    """A Hugging Face model directory, or the name of a model that Leeway can fetch
    (smollm2-135m-instruct)."""
    context: PositiveInt | None = None
    """Longest prompt + answer in tokens; by default what the model allows."""
