"""From the YAML file, the environment and overrides to a `Config`."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from leeway.config.schema import Config
from leeway.errors import ConfigError

ENV_PREFIX = "LEEWAY__"


def load(
    path: Path | None, overrides: Iterable[str] = (), environ: Mapping[str, str] = os.environ
) -> Config:
    """Reads, merges and validates.

    Raises:
        ConfigError: naming the key, its value and the remedy, one line a fault.
    """
    tree = _read_yaml(path) if path is not None else {}
    for name, value in environ.items():
        if name.startswith(ENV_PREFIX):
            _assign(tree, name.removeprefix(ENV_PREFIX).lower().split("__"), value, name)
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"override {override!r}: write key=value, e.g. trainer.lr=1e-5")
        _assign(tree, key.strip().split("."), value, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(fault) for fault in error.errors()]
        raise ConfigError("\n".join([f"{path or 'configuration'}:", *lines])) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: expected sections such as `model:`, found {type(tree).__name__}"
        )
    return tree


def _assign(tree: dict[str, Any], keys: list[str], text: str, source: str) -> None:
    node = tree
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{source}: {key!r} is a value, not a section")
        node = child
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: the value is not YAML: {error}") from error
    # YAML 1.1 reads "1e-5" (without a dot) as text.
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    node[keys[-1]] = value


def _explain(fault: Any) -> str:
    location = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        section = _section_at(fault["loc"][:-1])
        names = list(section.model_fields) if section is not None else []
        near = difflib.get_close_matches(str(fault["loc"][-1]), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
        return f"  {location}: unknown key; {hint}"
    if fault["type"] == "missing":
        return f"  {location}: required, but not given"
    message = fault["msg"].removeprefix("Value error, ")
    given = fault["input"]
    shown = "" if isinstance(given, dict | BaseModel) else f" = {given!r}"
    return f"  {location or 'configuration'}{shown}: {message}"


def _section_at(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = Config
    named = False
    for part in location:
        if named:  # A key of a mapping by name: what it holds is already at hand.
            named = False
            continue
        field = section.model_fields.get(str(part)) if section is not None else None
        if field is None:
            return None
        named = get_origin(field.annotation) is dict
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        section = next(
            (c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None
        )
    return section
