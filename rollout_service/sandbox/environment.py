"""An environment in its worker: one episode at a time.

A class with `reset(**columns)` and either methods that are tools (public, with types and a
docstring; the model calls them) or `step(action)`.

- `reset` gets the row's columns, and judges, by the names of its parameters. It returns the first
  message's text, or chat messages, or None to keep the task's own; or, as Gymnasium's, a pair that
  begins with it.
- A tool's result is text, or what JSON can hold. Arguments that do not fit its types are told to
  the model; what a tool raises is the environment's fault.
- `step` returns the observation, or (observation, reward, done), or Gymnasium's five.
- `score(completion)`, if there is one, is asked at the end: a number or numbers by name.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ValidationError, create_model

from rollout_service.sandbox.judge import Judge, JudgeFailed
from rollout_service.sandbox.loading import FaultError, finite, load, outcome, raised
from rollout_service.sandbox.reward import Columns

_OWN = ("reset", "step", "score", "close", "render")


class EnvironmentHost:
    """Answers {"reset": columns}, {"call": name, "arguments"}, {"step": text}, {"score": text}."""

    def __init__(self, spec: str, judges: dict[str, Judge]) -> None:
        self._make = load(spec)
        self._judges = judges
        self._environment: Any = None
        self._tools: dict[str, tuple[Callable[..., Any], type[BaseModel]]] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises `FaultError` for whatever the environment does wrong."""
        if "reset" in request:
            return self._reset(request["reset"])
        if "call" in request:
            return self._call(request["call"], request["arguments"])
        if "step" in request:
            return self._step(request["step"])
        if not hasattr(self._environment, "score"):
            return {"outcome": None}
        return {"outcome": outcome(self._do("score", self._environment.score, request["score"]))}

    def _reset(self, columns: dict[str, Any]) -> dict[str, Any]:
        if self._environment is not None and hasattr(self._environment, "close"):
            self._do("close", self._environment.close)
        self._environment = self._do("()", self._make)
        reset = getattr(self._environment, "reset", None)
        if reset is None:
            raise FaultError("has no reset; write `def reset(self, **columns)`")
        parameters = list(inspect.signature(reset).parameters.values())
        accepted = Columns(parameters, self._judges).accepted(columns)
        first = self._do("reset", reset, **accepted)
        if isinstance(first, tuple):  # Gymnasium: observation, info.
            first = first[0]
        stepwise = hasattr(self._environment, "step")
        self._tools = {} if stepwise else dict(_tools(self._environment))
        if not stepwise and not self._tools:
            raise FaultError("has neither tools nor step; write a public method, or step(action)")
        return {
            "messages": _messages(first),
            "stepwise": stepwise,
            "tools": [
                {
                    "name": name,
                    "description": inspect.getdoc(method) or "",
                    "parameters": _schema(model),
                }
                for name, (method, model) in self._tools.items()
            ],
        }

    def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if name not in self._tools:
            return {"result": f"error: no tool {name!r}; there are {', '.join(self._tools)}"}
        method, model = self._tools[name]
        try:
            given = model.model_validate(arguments)
        except ValidationError as error:
            faults = "; ".join(f"{f['loc'][0]}: {f['msg']}" for f in error.errors())
            return {"result": f"error: {faults}"}
        values = {key: getattr(given, key) for key in type(given).model_fields}
        return {"result": _text(self._do(name, method, **values))}

    def _step(self, action: str) -> dict[str, Any]:
        result = self._do("step", self._environment.step, action)
        if not isinstance(result, tuple):
            return {"observation": _text(result), "reward": None, "done": False}
        if len(result) == 5:
            observation, reward, terminated, truncated, _ = result
            done = bool(terminated or truncated)
        elif len(result) == 3:
            observation, reward, done = result
        else:
            raise FaultError(
                f"step returned {len(result)} values; return the observation, or (observation, "
                "reward, done)"
            )
        return {
            "observation": _text(observation),
            "reward": None if reward is None else finite(reward),
            "done": bool(done),
        }

    def _do(self, what: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except (Exception, SystemExit, JudgeFailed) as error:
            raise raised(f"{what} ", error, "environment") from error


def _tools(environment: Any) -> Any:
    for name, method in inspect.getmembers(environment, callable):
        if name.startswith("_") or name in _OWN or not inspect.ismethod(method):
            continue
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(method, eval_str=True).parameters.values():
            if parameter.annotation is inspect.Parameter.empty:
                raise FaultError(
                    f"{name}: its parameter {parameter.name!r} has no type; the model needs to "
                    f"know it, write e.g. `{parameter.name}: str`"
                )
            required = parameter.default is inspect.Parameter.empty
            fields[parameter.name] = (parameter.annotation, ... if required else parameter.default)
        yield name, (method, create_model(name, **fields))


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    schema.pop("title", None)
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
    return schema


def _messages(first: Any) -> list[dict[str, Any]] | None:
    if first is None or isinstance(first, list):
        return first
    return [{"role": "user", "content": _text(first)}]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
