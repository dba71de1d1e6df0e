"""A user's plain Python function, named in the configuration."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leeway.errors import ConfigError


def load_function(spec: str, key: str) -> Callable[..., Any]:
    """The function that `module:function` or `path/to/file.py:function` names.

    Args:
        key: Of the configuration, for messages.

    Raises:
        ConfigError: it cannot be found or imported.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise ConfigError(f"{key} = {spec!r}: write module:function or path/to/file.py:function")
    try:
        if source.endswith(".py"):
            found = importlib.util.spec_from_file_location(Path(source).stem, source)
            assert found is not None and found.loader is not None
            module = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
        function = getattr(module, name)
    except Exception as error:
        # The boundary to the user's code: whatever it raises is the configuration's fault.
        raise ConfigError(f"{key} = {spec!r}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigError(f"{key} = {spec!r}: is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]
