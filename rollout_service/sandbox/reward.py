"""A reward function in its worker: `reward(completion, **columns) -> float`.

Judges are passed as columns are, to parameters of their names.
"""

from __future__ import annotations

import inspect
from typing import Any

from rollout_service.sandbox.judge import Judge, JudgeFailed
from rollout_service.sandbox.loading import FaultError, finite, load, raised


class RewardHost:
    """Answers {"completion", "columns"} with {"value"}."""

    def __init__(self, spec: str, judges: dict[str, Judge]) -> None:
        self._function = load(spec)
        try:
            parameters = list(inspect.signature(self._function).parameters.values())
        except (TypeError, ValueError) as error:
            raise FaultError(
                f"its parameters cannot be read ({error}); use a Python function"
            ) from error
        if not parameters or parameters[0].kind in (
            inspect.Parameter.KEYWORD_ONLY,
            inspect.Parameter.VAR_KEYWORD,
        ):
            raise FaultError("takes no completion; write `def reward(completion, **columns)`")
        if inspect.iscoroutinefunction(self._function):
            raise FaultError("is asynchronous; write a plain function, it has a process of its own")
        self._first = parameters[0].name
        self._columns = Columns(parameters[1:], judges)
        if unused := self._columns.unused_judges:
            raise FaultError(
                f"has no parameter for the judges {unused}; add one, or leave them out of "
                "task.judges"
            )

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises `FaultError` for whatever the function does wrong."""
        columns = {k: v for k, v in request["columns"].items() if k != self._first}
        given = self._columns.accepted(columns)
        try:
            value = self._function(request["completion"], **given)
        except (Exception, SystemExit, JudgeFailed) as error:
            raise raised("", error, "function") from error
        return {"value": finite(value)}


class Columns:
    """Which columns of a row, and which judges, a function takes."""

    def __init__(self, parameters: list[inspect.Parameter], judges: dict[str, Judge]) -> None:
        self._judges = judges
        self._all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self._named = [
            p
            for p in parameters
            if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        ]

    @property
    def unused_judges(self) -> list[str]:
        return [name for name in self._judges if name not in {p.name for p in self._named}]

    def accepted(self, row: dict[str, Any]) -> dict[str, Any]:
        """Raises `FaultError` when one is missing, or could be a judge or a column."""
        judges = {p.name: self._judges[p.name] for p in self._named if p.name in self._judges}
        for name in judges.keys() & row.keys():
            raise FaultError(f"{name!r} is a judge and a column of the row; rename one of them")
        columns = {**row, **judges}
        for parameter in self._named:
            if parameter.default is inspect.Parameter.empty and parameter.name not in columns:
                raise FaultError(
                    f"needs the column {parameter.name!r}, but the row has {sorted(row)}; add "
                    "it to the data, or give the parameter a default"
                )
        names = {p.name for p in self._named}
        return {k: v for k, v in columns.items() if self._all or k in names}
