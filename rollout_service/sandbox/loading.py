"""Finds what the user wrote, and says what is wrong with it. Runs in the workers; light imports."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import numbers
import sys
import traceback
from pathlib import Path
from typing import Any

from leeway.errors import InfrastructureError

# The longest answer of a worker, in one line: a tool's result, an environment's messages.
ANSWER_BYTES = 4 << 20
# A fault is cut to this many characters.
_FAULT_LENGTH = 2000


class FaultError(Exception):
    """What the user has to know: the message names the cause and the remedy.

    Args:
        infrastructure: Something that the code needs is away: another attempt may succeed.
    """

    def __init__(self, message: str, *, infrastructure: bool = False) -> None:
        super().__init__(message)
        self.infrastructure = infrastructure


def answer_line(message: dict[str, Any]) -> bytes:
    """A worker's answer, ready to be written; a fault where it cannot be one."""
    try:
        line = json.dumps(message).encode() + b"\n"
    except (TypeError, ValueError) as error:
        return fault_line(f"returned what JSON cannot hold: {error}; return text", message)
    if len(line) > ANSWER_BYTES:
        return fault_line(f"returned {len(line)} bytes; return less than {ANSWER_BYTES}", message)
    return line


def fault_line(fault: object, message: dict[str, Any] | None = None) -> bytes:
    """A fault, for the same run as the message."""
    run = {"run": message["run"]} if message is not None and "run" in message else {}
    away = {"infrastructure": True} if getattr(fault, "infrastructure", False) else {}
    return json.dumps({**run, "fault": str(fault)[:_FAULT_LENGTH], **away}).encode() + b"\n"


def load(spec: str) -> Any:
    """What `module:name` or `path/to/file.py:name` names.

    Raises:
        FaultError: it cannot be found, imported or called.
    """
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
        raise FaultError(f"importing {source} raised {describe(error)}; repair it") from error
    found = getattr(module, name, None)
    if not callable(found):
        known = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value)
            or (inspect.isclass(value) and value.__module__ == module.__name__)
        ]
        raise FaultError(f"{source} has no function {name!r}; it has: {', '.join(known) or 'none'}")
    return found


def describe(error: BaseException) -> str:
    """The traceback's last line, and where it was raised."""
    last = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{last} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else last


def raised(what: str, error: BaseException, where: str) -> FaultError:
    """The fault of code that raised; `InfrastructureError` is how code says that it is not its own.

    Args:
        what: Raised it, for the message.
        where: To repair it.
    """
    if isinstance(error, InfrastructureError):
        return FaultError(f"{what}needs what is away: {error}", infrastructure=True)
    return FaultError(f"{what}raised {describe(error)}; handle this case in the {where}")


def finite(value: Any) -> float:
    """A number that something returned.

    Raises:
        FaultError: it is none, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise FaultError(
            f"returned {value!r:.200} ({type(value).__name__}); return a number, e.g. "
            "float(correct)"
        )
    number = float(value)
    if not math.isfinite(number):
        raise FaultError(f"returned {number}; return a finite number")
    return number


def outcome(value: Any) -> dict[str, float]:
    """A number, or numbers by name, as {"score", ...}.

    Raises:
        FaultError: it is neither.
    """
    if isinstance(value, dict):
        return {str(name): finite(number) for name, number in value.items()}
    return {"score": finite(value)}


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FaultError(f"no file {path} below {Path.cwd()}; check the path")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None and module_spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[path.stem] = module
    module_spec.loader.exec_module(module)
    return module
