"""What every part of the configuration is: a frozen model, strict about unknown keys."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator


class Section(BaseModel):
    """A part of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Limits(Section):
    """Between what a controller keeps the number that it tunes."""

    lowest: PositiveInt
    highest: PositiveInt

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.lowest > self.highest:
            raise ValueError(f"lowest = {self.lowest} is above highest = {self.highest}")
        return self
