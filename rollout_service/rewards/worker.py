"""The process that holds a reward function. Standard library only; run as a script by `pool`.

Protocol, one JSON object a line: first the worker says {"ready": true} or {"fault": why it cannot
start}; then each request {"completion": text, "columns": {...}} gets one answer, {"value": number}
or {"fault": what the function did wrong}.

What must hold: nothing but answers reaches the pipe. The function's own standard output goes to
standard error, its standard input is empty. The process ends with its parent: when its requests
end, and on Linux also when the parent dies during a call.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
# Answers are read with a bounded buffer: a fault is cut to this many characters.
_FAULT_LENGTH = 2000


class FaultError(Exception):
    """What the user has to know: the message names the cause and the remedy."""


class Reward:
    """A loaded reward function: `reward(completion, **columns) -> float`."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._function = _load(spec)
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
        named = parameters[1:]
        self._all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in named)
        self._first = parameters[0].name
        self._named = [
            p
            for p in named
            if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        ]

    def __call__(self, completion: str, columns: dict[str, Any]) -> float:
        """Raises `FaultError` for whatever the function does wrong."""
        for parameter in self._named:
            if parameter.default is inspect.Parameter.empty and parameter.name not in columns:
                raise FaultError(
                    f"needs the column {parameter.name!r}, but the row has {sorted(columns)}; add "
                    "it to the data, or give the parameter a default"
                )
        accepted = {p.name for p in self._named} if not self._all else columns.keys()
        given = {k: v for k, v in columns.items() if k in accepted and k != self._first}
        try:
            value = self._function(completion, **given)
        except (Exception, SystemExit) as error:
            raise FaultError(
                f"raised {_describe(error)}; handle this case in the function"
            ) from error
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise FaultError(
                f"returned {value!r:.200} ({type(value).__name__}); return a number, e.g. "
                "float(correct)"
            )
        number = float(value)
        if not math.isfinite(number):
            raise FaultError(f"returned {number}; return a finite number")
        return number


def _load(spec: str) -> Callable[..., Any]:
    source, _, name = spec.rpartition(":")
    if not source or not name.isidentifier():
        raise FaultError("write module:function or path/to/file.py:function")
    try:
        if source.endswith(".py"):
            module = _import_file(Path(source))
        else:
            module = importlib.import_module(source)
    except FaultError:
        raise
    except (Exception, SystemExit) as error:
        raise FaultError(f"importing {source} raised {_describe(error)}; repair it") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise FaultError(f"{source} has no function {name!r}; it has: {', '.join(known) or 'none'}")
    return function  # type: ignore[no-any-return]


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FaultError(f"no file {path} below {Path.cwd()}; check the path")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None and module_spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[path.stem] = module
    module_spec.loader.exec_module(module)
    return module


def _describe(error: BaseException) -> str:
    """The traceback's last line, and where it was raised."""
    last = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{last} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else last


def _end_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It died before this was set.
        os._exit(1)


def main(spec: str, parent: int) -> None:
    _end_with_parent(parent)
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message).encode() + b"\n")
        answers.flush()

    sys.path.insert(0, str(Path.cwd()))
    try:
        reward = Reward(spec)
    except FaultError as fault:
        answer({"fault": str(fault)[:_FAULT_LENGTH]})
        return
    answer({"ready": True})
    for line in requests:
        request = json.loads(line)
        try:
            answer({"value": reward(request["completion"], request["columns"])})
        except FaultError as fault:
            answer({"fault": str(fault)[:_FAULT_LENGTH]})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
